#pragma once

// Vectors of CUDA, with their alignments.
#define OPENMSA_EMULATE_VECTORS(name, type)                                      \
  struct alignas(2 * sizeof(type)) name##2 {                                     \
    type x, y;                                                                   \
  };                                                                             \
  struct name##3 {                                                               \
    type x, y, z;                                                                \
  };                                                                             \
  struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 {        \
    type x, y, z, w;                                                             \
  };                                                                             \
  constexpr name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  constexpr name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  constexpr name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

OPENMSA_EMULATE_VECTORS(char, signed char)
OPENMSA_EMULATE_VECTORS(uchar, unsigned char)
OPENMSA_EMULATE_VECTORS(short, short)
OPENMSA_EMULATE_VECTORS(ushort, unsigned short)
OPENMSA_EMULATE_VECTORS(int, int)
OPENMSA_EMULATE_VECTORS(uint, unsigned)
OPENMSA_EMULATE_VECTORS(longlong, long long)
OPENMSA_EMULATE_VECTORS(ulonglong, unsigned long long)
OPENMSA_EMULATE_VECTORS(float, float)
OPENMSA_EMULATE_VECTORS(double, double)
#undef OPENMSA_EMULATE_VECTORS

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_count = 1, unsigned y_count = 1, unsigned z_count = 1)
      : x(x_count), y(y_count), z(z_count) {}
};
