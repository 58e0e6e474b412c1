/* The C interface from C11, with openmsa.h alone. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "openmsa/openmsa.h"

static int failures = 0;

#define CHECK(condition)                                                                               \
  do {                                                                                                 \
    if (!(condition)) {                                                                                \
      ++failures;                                                                                      \
      (void)fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, openmsa_last_error()); \
    }                                                                                                  \
  } while (0)

enum { TOKENS = 3, HEADS = 2, DIM = 4, TOPK = 2 };

static openmsa_tensor matrix(void* data, int32_t dtype, int64_t rows, int64_t columns) {
  openmsa_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.rank = 2;
  tensor.dtype = dtype;
  tensor.device_type = OPENMSA_CPU;
  tensor.shape[0] = rows;
  tensor.shape[1] = columns;
  tensor.strides[0] = columns;
  tensor.strides[1] = 1;
  return tensor;
}

static openmsa_tensor cube(void* data, int32_t dtype, int64_t planes, int64_t rows, int64_t columns) {
  openmsa_tensor tensor = matrix(data, dtype, rows, columns);
  tensor.rank = 3;
  tensor.shape[0] = planes;
  tensor.shape[1] = rows;
  tensor.shape[2] = columns;
  tensor.strides[0] = rows * columns;
  tensor.strides[1] = columns;
  tensor.strides[2] = 1;
  return tensor;
}

/* One block holds every key, so attention is dense and causal: the first token attends to itself alone. */
static void select_and_attend(void) {
  float q[TOKENS * HEADS * DIM], k[TOKENS * DIM], v[TOKENS * DIM], out[TOKENS * HEADS * DIM], lse[HEADS * TOKENS];
  int32_t indices[TOKENS * TOPK];
  for (int n = 0; n < TOKENS * HEADS * DIM; ++n) q[n] = 0.1F * (float)n;
  for (int n = 0; n < TOKENS * DIM; ++n) {
    k[n] = 0.2F * (float)n;
    v[n] = (float)n;
  }
  const openmsa_tensor q_view = cube(q, OPENMSA_FLOAT32, TOKENS, HEADS, DIM);
  const openmsa_tensor k_view = cube(k, OPENMSA_FLOAT32, TOKENS, 1, DIM);
  const openmsa_tensor v_view = cube(v, OPENMSA_FLOAT32, TOKENS, 1, DIM);
  const openmsa_tensor out_view = cube(out, OPENMSA_FLOAT32, TOKENS, HEADS, DIM);
  const openmsa_tensor lse_view = matrix(lse, OPENMSA_FLOAT32, HEADS, TOKENS);
  const openmsa_tensor indices_view = cube(indices, OPENMSA_INT32, 1, TOKENS, TOPK);

  openmsa_select_blocks_args select;
  memset(&select, 0, sizeof select);
  select.index_q = &k_view; /* one index head */
  select.index_k = &k_view;
  select.selection.topk = TOPK;
  select.selection.local_blocks = 1;
  select.block_size = 64;
  select.indices = &indices_view;
  CHECK(openmsa_select_blocks(&select) == OPENMSA_OK);
  for (int token = 0; token < TOKENS; ++token) {
    CHECK(indices[TOPK * token] == 0);
    CHECK(indices[TOPK * token + 1] == -1);
  }

  openmsa_sparse_attention_args attend;
  memset(&attend, 0, sizeof attend);
  attend.q = &q_view;
  attend.k = &k_view;
  attend.v = &v_view;
  attend.indices = &indices_view;
  attend.block_size = 64;
  attend.out = &out_view;
  attend.lse = &lse_view;
  const double scale = 0.25;
  attend.scale = &scale;
  CHECK(openmsa_sparse_attention(&attend) == OPENMSA_OK);
  for (int n = 0; n < HEADS * DIM; ++n) CHECK(fabsf(out[n] - v[n % DIM]) < 1e-6F);
  double score = 0;
  for (int d = 0; d < DIM; ++d) score += (double)q[d] * (double)k[d];
  CHECK(fabs((double)lse[0] - scale * score) < 1e-5);

  int64_t bytes = -1;
  CHECK(openmsa_workspace_size(OPENMSA_SPARSE_ATTENTION, &attend, &bytes) == OPENMSA_OK);
  CHECK(bytes >= 0);
  CHECK(openmsa_workspace_size((openmsa_operation)1000, &attend, &bytes) == OPENMSA_INVALID_ARGUMENT);
  CHECK(strncmp(openmsa_last_error(), "operation: got 1000", 19) == 0);

  const double negative = -1;
  attend.scale = &negative;
  CHECK(openmsa_sparse_attention(&attend) == OPENMSA_INVALID_ARGUMENT);
  CHECK(strncmp(openmsa_last_error(), "scale: got -1", 13) == 0);
}

int main(void) {
  char version[32];
  (void)snprintf(version, sizeof version, "%d.%d.%d", OPENMSA_VERSION_MAJOR, OPENMSA_VERSION_MINOR,
                 OPENMSA_VERSION_PATCH);
  CHECK(strcmp(openmsa_last_error(), "") == 0);
  CHECK(strcmp(openmsa_version(), version) == 0);
  CHECK(strncmp(openmsa_info(), "{\"version\": ", 12) == 0);
  CHECK(openmsa_workspace_limit() == (int64_t)1 << 30);
  CHECK(openmsa_set_workspace_limit(0) == OPENMSA_INVALID_ARGUMENT);
  CHECK(openmsa_check_inputs() == 0);
  openmsa_set_check_inputs(1);
  CHECK(openmsa_check_inputs() == 1);
  CHECK(openmsa_num_threads() == 0);
  CHECK(openmsa_set_num_threads(2) == OPENMSA_OK);
  CHECK(openmsa_num_threads() == 2);
  CHECK(openmsa_set_num_threads(-1) == OPENMSA_INVALID_ARGUMENT);
  select_and_attend();
  CHECK(openmsa_paged_append(NULL) == OPENMSA_INVALID_ARGUMENT);
  return failures == 0 ? 0 : 1;
}
