/* openmsa: MiniMax Sparse Attention (arXiv 2606.13392), C interface.
 *
 * Letters in shapes: Tq, Tk query and key tokens of all sequences together; B sequences; Hq query heads; Hkv key/value
 * heads; Hi index heads; Hik index key heads; D, Dv, Di head dimensions of q and k, of v, and of the index branch.
 * Hkv divides Hi, Hi divides Hq, Hik divides Hi. Index head r serves the query heads [r Hq/Hi, (r+1) Hq/Hi).
 *
 * Every function returns a status; openmsa_last_error() has the message of the calling thread's last failure. A call
 * that fails its checks has written nothing. Functions may be called from several threads at once.
 * docs/definition.md has the formulas and the meaning of every edge case. */
#ifndef OPENMSA_OPENMSA_H
#define OPENMSA_OPENMSA_H

#include <stdint.h>

#define OPENMSA_VERSION_MAJOR 0
#define OPENMSA_VERSION_MINOR 1
#define OPENMSA_VERSION_PATCH 0

#if defined(_WIN32)
#define OPENMSA_API
#else
#define OPENMSA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum openmsa_status {
  OPENMSA_OK = 0,
  OPENMSA_INVALID_ARGUMENT = 1, /* an argument is wrong: rank, shape, value, missing */
  OPENMSA_UNSUPPORTED = 2,      /* valid, but the backend or device cannot do it */
  OPENMSA_OUT_OF_MEMORY = 3,    /* host or device memory ran out */
  OPENMSA_DEVICE_ERROR = 4,     /* the device or its driver reported an error */
  OPENMSA_INTERNAL_ERROR = 5    /* a fault of this library */
} openmsa_status;

typedef enum openmsa_dtype {
  OPENMSA_FLOAT32 = 0,
  OPENMSA_FLOAT16 = 1,
  OPENMSA_BFLOAT16 = 2,
  OPENMSA_FLOAT8_E4M3 = 3, /* the "fn" variant: no infinity, largest value 448 */
  OPENMSA_INT32 = 4,
  OPENMSA_INT64 = 5,
  OPENMSA_UINT8 = 6
} openmsa_dtype;

typedef enum openmsa_device_type { OPENMSA_CPU = 0, OPENMSA_GPU = 1 } openmsa_device_type;

enum { OPENMSA_MAX_RANK = 4 };

/* A view of memory that the caller owns. The last axis must be contiguous (stride 1, unless its length is at most 1);
 * on the CPU every other stride is free, 0 and negative included (outputs must not overlap themselves). */
typedef struct openmsa_tensor {
  void* data;                        /* first element; may be null when the tensor has no element */
  int64_t shape[OPENMSA_MAX_RANK];   /* entries from rank on are ignored */
  int64_t strides[OPENMSA_MAX_RANK]; /* in elements */
  int32_t rank;                      /* a larger one than OPENMSA_MAX_RANK is refused, by every operation */
  int32_t dtype;                     /* openmsa_dtype */
  int32_t device_type;               /* openmsa_device_type */
  int32_t device_index;              /* 0 for the CPU */
} openmsa_tensor;

/* Packed sequences. All null = one sequence. cu_seqlens_q and cu_seqlens_k come together: int32 [B+1], not falling,
 * from 0 on, ending at Tq and Tk. With k_starts (int32 [B]) sequence b's keys are [k_starts[b], cu_seqlens_k[b+1]), so
 * that sequences may share keys. Query i of a sequence with n_q queries and n_k keys sees its keys j <= n_k - n_q + i.
 */
typedef struct openmsa_sequences {
  const openmsa_tensor* cu_seqlens_q;
  const openmsa_tensor* cu_seqlens_k;
  const openmsa_tensor* k_starts;
} openmsa_sequences;

/* Paged requests. Key j of request b is row j % block_size of page block_table[b][j / block_size]; the page size is the
 * block size. Query rows from cu_seqlens_q[B] on, and requests of length 0, are padding: they see no key. */
typedef struct openmsa_requests {
  const openmsa_tensor* block_table;  /* int32 [B, max_pages]; entries past a request's length are never read */
  const openmsa_tensor* seq_lens;     /* int32 [B]; keys of each request, its new tokens included */
  const openmsa_tensor* cu_seqlens_q; /* int32 [B+1] */
} openmsa_requests;

/* How blocks are chosen. Forced blocks use slots: the local_blocks blocks that end at the query's own block first, then
 * the first init_blocks blocks; the rest are the best-scored earlier blocks. */
typedef struct openmsa_selection {
  int64_t topk;         /* blocks per query and index head, >= 1 */
  int64_t init_blocks;  /* >= 0 */
  int64_t local_blocks; /* >= 0; 0 lets the own block compete by its score */
} openmsa_selection;

/* Where a call runs. */
typedef struct openmsa_execution {
  void* stream;                    /* the GPU's queue; ignored on the CPU */
  const openmsa_tensor* workspace; /* uint8 [bytes] on the call's device, or null: the call allocates what it needs */
} openmsa_execution;

/* ---- Operations. In each structure outputs come last; "optional" pointers may be null. ---- */

typedef struct openmsa_select_blocks_args {
  const openmsa_tensor* index_q; /* [Tq, Hi, Di]; float32, float16, bfloat16, or both float8_e4m3 */
  const openmsa_tensor* index_k; /* [Tk, Hik, Di], same type */
  openmsa_sequences sequences;
  openmsa_selection selection;
  int64_t block_size;  /* 128 or 64; 32 on the CPU only */
  const double* scale; /* null = 1/sqrt(Di); finite and > 0 */
  openmsa_execution execution;
  const openmsa_tensor* indices; /* out [Hi, Tq, topk] int32 or int64: block numbers within the sequence's keys. Scored
                                    blocks by score descending, equal ones by lower number, then the forced local blocks
                                    ascending, then -1 */
  const openmsa_tensor* index_lse; /* optional out [Hi, Tq] float32: natural log-sum-exp of the scaled index scores over
                                      the visible tokens of the selected blocks; -inf for a query that sees no key */
} openmsa_select_blocks_args;

typedef struct openmsa_sparse_attention_args {
  const openmsa_tensor* q;       /* [Tq, Hq, D]; float32, float16 or bfloat16 */
  const openmsa_tensor* k;       /* [Tk, Hkv, D], same type */
  const openmsa_tensor* v;       /* [Tk, Hkv, Dv], same type */
  const openmsa_tensor* indices; /* [Hi, Tq, topk] int32 or int64, any order, any strides; entries < 0 or beyond the
                                    visible blocks are ignored and a repeated block counts once */
  openmsa_sequences sequences;
  int64_t block_size;
  const double* scale; /* null = 1/sqrt(D); finite and > 0 */
  openmsa_execution execution;
  const openmsa_tensor* out; /* out [Tq, Hq, Dv], q's type; 0 for a query that sees no key */
  const openmsa_tensor* lse; /* optional out [Hq, Tq] float32, natural logarithm */
} openmsa_sparse_attention_args;

typedef struct openmsa_sparse_attention_backward_args {
  const openmsa_tensor *q, *k, *v, *indices; /* as given to the forward call */
  const openmsa_tensor *out, *lse;           /* as the forward call returned them */
  const openmsa_tensor* d_out;               /* [Tq, Hq, Dv], q's type */
  openmsa_sequences sequences;
  int64_t block_size;
  const double* scale;
  int32_t deterministic; /* nonzero: bitwise repeatable */
  openmsa_execution execution;
  const openmsa_tensor *d_q, *d_k, *d_v; /* out, shaped and typed like q, k, v; every element is written */
} openmsa_sparse_attention_backward_args;

typedef struct openmsa_msa_attention_args {
  const openmsa_tensor *q, *k, *v;         /* as in sparse_attention */
  const openmsa_tensor *index_q, *index_k; /* as in select_blocks */
  openmsa_sequences sequences;
  openmsa_selection selection; /* ignored with warmup */
  int64_t block_size;
  const double* scale;       /* null = 1/sqrt(D) */
  const double* index_scale; /* null = 1/sqrt(Di) */
  int32_t warmup;            /* nonzero: dense attention, and the index statistics over every visible key */
  openmsa_execution execution;
  const openmsa_tensor* out;       /* out [Tq, Hq, Dv], q's type */
  const openmsa_tensor* lse;       /* out [Hq, Tq] float32 */
  const openmsa_tensor* indices;   /* out [Hi, Tq, topk] int32; null exactly with warmup */
  const openmsa_tensor* index_lse; /* optional out [Hi, Tq] float32 */
  const openmsa_tensor* kl; /* optional out [] float32: sum over queries and index heads of KL(teacher || student), over
                               Hi Tq. Exact when the call returns; costs another QK^T. Needs index_lse */
} openmsa_msa_attention_args;

typedef struct openmsa_msa_attention_backward_args {
  const openmsa_tensor *q, *k, *v, *index_q, *index_k; /* as given to the forward call */
  const openmsa_tensor *out, *lse, *indices,
      *index_lse;              /* as the forward call returned them; indices null with warmup */
  const openmsa_tensor* d_out; /* optional [Tq, Hq, Dv]: null = no gradient through out */
  const openmsa_tensor* d_kl;  /* optional [] float32: upstream gradient of kl; null = none */
  openmsa_sequences sequences;
  int64_t block_size;
  const double* scale;
  const double* index_scale;
  int32_t warmup;
  int32_t deterministic;
  openmsa_execution execution;
  const openmsa_tensor *d_q, *d_k, *d_v;       /* out, all or none; null exactly when d_out is null */
  const openmsa_tensor *d_index_q, *d_index_k; /* out, both or none; null exactly when d_kl is null */
  const openmsa_tensor* kl;                    /* optional out [] float32: the KL itself, not times d_kl */
} openmsa_msa_attention_backward_args;

typedef struct openmsa_paged_select_blocks_args {
  const openmsa_tensor* index_q;       /* [Tq, Hi, Di] */
  const openmsa_tensor* index_k_cache; /* [pages, block_size, Hik, Di], same type */
  openmsa_requests requests;
  openmsa_selection selection;
  const double* scale; /* null = 1/sqrt(Di) */
  openmsa_execution execution;
  const openmsa_tensor* indices;   /* out [Hi, Tq, topk] int32 or int64: block numbers within the request */
  const openmsa_tensor* index_lse; /* optional out [Hi, Tq] float32 */
} openmsa_paged_select_blocks_args;

/* A factor of a float8 cache, so that K = factor x stored: a number, or a [] float32 tensor on the call's device, which
 * goes first. Both absent = 1. Refused for caches of other types. */
typedef struct openmsa_cache_scale {
  const double* value;
  const openmsa_tensor* tensor;
} openmsa_cache_scale;

typedef struct openmsa_paged_sparse_attention_args {
  const openmsa_tensor* q;       /* [Tq, Hq, D]; float32, float16 or bfloat16 */
  const openmsa_tensor* k_cache; /* [pages, block_size, Hkv, D]; q's type or float8_e4m3 */
  const openmsa_tensor* v_cache; /* [pages, block_size, Hkv, Dv], k_cache's type */
  const openmsa_tensor* indices; /* [Hi, Tq, topk] int32 or int64 */
  openmsa_requests requests;
  const double* scale; /* null = 1/sqrt(D) */
  openmsa_cache_scale k_scale, v_scale;
  openmsa_execution execution;
  const openmsa_tensor* out; /* out [Tq, Hq, Dv], q's type */
  const openmsa_tensor* lse; /* optional out [Hq, Tq] float32 */
} openmsa_paged_sparse_attention_args;

typedef struct openmsa_paged_msa_attention_args {
  const openmsa_tensor *q, *k_cache, *v_cache;   /* as in paged_sparse_attention */
  const openmsa_tensor *index_q, *index_k_cache; /* as in paged_select_blocks */
  openmsa_requests requests;
  openmsa_selection selection;
  const double* scale;
  const double* index_scale;
  openmsa_cache_scale k_scale, v_scale;
  openmsa_execution execution;
  const openmsa_tensor* out;     /* out [Tq, Hq, Dv], q's type */
  const openmsa_tensor* lse;     /* out [Hq, Tq] float32 */
  const openmsa_tensor* indices; /* out [Hi, Tq, topk] int32 */
} openmsa_paged_msa_attention_args;

/* Merges attentions of the same queries over disjoint sets of keys. */
typedef struct openmsa_combine_args {
  const openmsa_tensor* outs; /* [S, Tq, Hq, Dv]; float32, float16 or bfloat16 */
  const openmsa_tensor* lses; /* [S, Hq, Tq] float32, natural logarithm */
  openmsa_execution execution;
  const openmsa_tensor* out; /* out [Tq, Hq, Dv], outs' type */
  const openmsa_tensor* lse; /* out [Hq, Tq] float32 */
} openmsa_combine_args;

/* How much of dense attention a selection holds. */
typedef struct openmsa_captured_mass_args {
  const openmsa_tensor *q, *k, *indices; /* as in sparse_attention */
  openmsa_sequences sequences;
  int64_t block_size;
  const double* scale;
  openmsa_execution execution;
  const openmsa_tensor*
      share; /* out [Hi, Tq] float32: head-mean dense probability inside the row's valid distinct blocks */
  const openmsa_tensor* best; /* out [Hi, Tq] float32: the most that as many blocks could hold; both 0 without keys */
} openmsa_captured_mass_args;

/* Writes each request's new rows at its last n_q positions (seq_lens counts them). */
typedef struct openmsa_paged_append_args {
  const openmsa_tensor* k;       /* [Tq, Hkv, D] */
  const openmsa_tensor* v;       /* [Tq, Hkv, Dv], k's type */
  const openmsa_tensor* index_k; /* [Tq, Hik, Di] */
  openmsa_requests requests;
  openmsa_cache_scale k_scale, v_scale; /* stored = K / factor, rounded to nearest even, saturated */
  openmsa_execution execution;
  const openmsa_tensor* k_cache;       /* in/out [pages, block_size, Hkv, D]; k's type or float8_e4m3 */
  const openmsa_tensor* v_cache;       /* in/out [pages, block_size, Hkv, Dv]; v's type or float8_e4m3 */
  const openmsa_tensor* index_k_cache; /* in/out [pages, block_size, Hik, Di]; index_k's type or float8_e4m3 */
} openmsa_paged_append_args;

OPENMSA_API openmsa_status openmsa_select_blocks(const openmsa_select_blocks_args* args);
OPENMSA_API openmsa_status openmsa_sparse_attention(const openmsa_sparse_attention_args* args);
OPENMSA_API openmsa_status openmsa_sparse_attention_backward(const openmsa_sparse_attention_backward_args* args);
OPENMSA_API openmsa_status openmsa_msa_attention(const openmsa_msa_attention_args* args);
OPENMSA_API openmsa_status openmsa_msa_attention_backward(const openmsa_msa_attention_backward_args* args);
OPENMSA_API openmsa_status openmsa_paged_select_blocks(const openmsa_paged_select_blocks_args* args);
OPENMSA_API openmsa_status openmsa_paged_sparse_attention(const openmsa_paged_sparse_attention_args* args);
OPENMSA_API openmsa_status openmsa_paged_msa_attention(const openmsa_paged_msa_attention_args* args);
OPENMSA_API openmsa_status openmsa_combine(const openmsa_combine_args* args);
OPENMSA_API openmsa_status openmsa_captured_mass(const openmsa_captured_mass_args* args);
OPENMSA_API openmsa_status openmsa_paged_append(const openmsa_paged_append_args* args);

/* Bytes that `workspace` must have for the operation with these arguments, whose tensors are checked as the operation
 * itself checks them but not read (the workspace and, here, output tensors' data may be null). */
typedef enum openmsa_operation {
  OPENMSA_SELECT_BLOCKS = 0,
  OPENMSA_SPARSE_ATTENTION = 1,
  OPENMSA_SPARSE_ATTENTION_BACKWARD = 2,
  OPENMSA_MSA_ATTENTION = 3,
  OPENMSA_MSA_ATTENTION_BACKWARD = 4,
  OPENMSA_PAGED_SELECT_BLOCKS = 5,
  OPENMSA_PAGED_SPARSE_ATTENTION = 6,
  OPENMSA_PAGED_MSA_ATTENTION = 7,
  OPENMSA_COMBINE = 8,
  OPENMSA_CAPTURED_MASS = 9,
  OPENMSA_PAGED_APPEND = 10
} openmsa_operation;
OPENMSA_API openmsa_status openmsa_workspace_size(openmsa_operation operation, const void* args, int64_t* bytes);

/* The most workspace that an operation may ask for, beyond what grows with its queries. Default 1 GiB; > 0. */
OPENMSA_API openmsa_status openmsa_set_workspace_limit(int64_t bytes);
OPENMSA_API int64_t openmsa_workspace_limit(void);

/* Nonzero: GPU calls also validate the values of offsets, lengths and tables, as the CPU always does; this waits for
 * the GPU. Off by default. */
OPENMSA_API void openmsa_set_check_inputs(int32_t enabled);
OPENMSA_API int32_t openmsa_check_inputs(void);

/* The most threads that CPU calls of the calling thread use, 0 to 1024; more than there are processors count as those.
 * 0, the default, leaves it to OpenMP (OMP_NUM_THREADS, omp_set_num_threads). Results do not depend on it. Calls that
 * are made inside a parallel region, or in a forked child, use one thread. Each thread that calls has a team of its
 * own. */
OPENMSA_API openmsa_status openmsa_set_num_threads(int32_t threads);
OPENMSA_API int32_t openmsa_num_threads(void);

/* Message of the last failure on this thread, "" before the first; valid until the thread's next call. */
OPENMSA_API const char* openmsa_last_error(void);

/* "major.minor.patch". */
OPENMSA_API const char* openmsa_version(void);

/* What this build holds and this machine offers, as one line of JSON: {"version", "backends": [{"name", "device",
 * "available", "operations", ...}], "devices": [...]}. A backend that chooses among instruction sets has its choice in
 * "target". Valid until the thread's next call. */
OPENMSA_API const char* openmsa_info(void);

#ifdef __cplusplus
}
#endif
#endif /* OPENMSA_OPENMSA_H */
