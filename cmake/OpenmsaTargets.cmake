# What every target of the project gets: warnings, sanitizers, the compiler cache.
find_program(OPENMSA_CCACHE ccache)
if(OPENMSA_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER "${OPENMSA_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${OPENMSA_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${OPENMSA_CCACHE}")
endif()

function(openmsa_target_options target)
  set(host $<COMPILE_LANGUAGE:C,CXX>)
  # Messages name files as the project knows them, wherever it was built.
  target_compile_options(${target} PRIVATE "$<${host}:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>")
  target_compile_options(${target} PRIVATE "$<${host}:-Wall;-Wextra;-Wshadow;-Wpointer-arith>"
                                           "$<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor;-Woverloaded-virtual>")
  if(OPENMSA_WERROR)
    target_compile_options(${target} PRIVATE "$<${host}:-Werror>")
  endif()
  if(OPENMSA_SANITIZE)
    target_compile_options(${target} PRIVATE "$<${host}:-fsanitize=${OPENMSA_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
    target_link_options(${target} PRIVATE "-fsanitize=${OPENMSA_SANITIZE}")
  endif()
endfunction()
