# cmake -DSOURCE=dir -DHEADER=file -P OpenmsaCommit.cmake: writes the commit of the sources into a header, which is left
# alone when nothing changed. Sources without git's history, or a machine without git, give an empty commit.
cmake_minimum_required(VERSION 3.25)
set(commit "")
set(modified 0)
find_program(git git)
# A checkout that happens to lie inside another repository is not meant.
if(git AND EXISTS "${SOURCE}/.git")
  execute_process(COMMAND "${git}" -C "${SOURCE}" rev-parse --short=12 HEAD RESULT_VARIABLE failed
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(failed)
    set(commit "")
  else()
    execute_process(COMMAND "${git}" -C "${SOURCE}" diff-index --quiet HEAD -- src include cmake CMakeLists.txt
                    RESULT_VARIABLE modified ERROR_QUIET)
    if(modified)
      set(modified 1)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT "${HEADER}" CONTENT "#define OPENMSA_COMMIT \"@commit@\"\n#define OPENMSA_COMMIT_MODIFIED @modified@\n" @ONLY)
