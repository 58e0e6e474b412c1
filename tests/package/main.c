#include <openmsa/openmsa.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  openmsa_combine_args args;
  memset(&args, 0, sizeof args);
  if (openmsa_combine(&args) != OPENMSA_INVALID_ARGUMENT) return 1;
  printf("openmsa %s: %s\n", openmsa_version(), openmsa_last_error());
  return strncmp(openmsa_last_error(), "outs: ", 6) == 0 ? 0 : 1;
}
