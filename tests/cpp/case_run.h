// Runs the operations of a case, through the public API or on a backend's stages directly, on any device.
#pragma once

#include <list>
#include <map>
#include <string>

#include "api/stages.h"
#include "cpp/case_table.h"

namespace openmsa::cases {

using Images = std::map<TensorId, HostTensor>;
using Results = std::map<std::string, HostTensor>;

// The floating-point inputs of a case and its caller's selection. The reference holds until the next case is asked for:
// the operations of a case follow each other.
const Images& input_images(const Case& c, bool poisoned);

// d_kl of backward operations.
inline constexpr float kUpstreamOfKl = 0.75F;

// The inputs of a case on a device.
struct Inputs {
  Inputs(const Case& c, DeviceMemory& memory, const Images& images);

  SequenceLayout layout() const;
  openmsa_sequences sequences() const;
  openmsa_requests requests() const;
  CacheScale k_scale() const { return cache_scale(k_scale_value, k_scale_tensor); }
  CacheScale v_scale() const { return cache_scale(v_scale_value, v_scale_tensor); }

  const Case& c;
  DeviceMemory& memory;
  const Images& images;
  PlacedTensor q, k, v, index_q, index_k, d_out;
  PlacedTensor new_k, new_v, new_index_k;  // paged cases only
  PlacedTensor indices;                    // the caller's selection, where the case has one
  PlacedTensor outs, lses;                 // of combine
  PlacedTensor cu_seqlens_q, cu_seqlens_k, k_starts, block_table, seq_lens;
  PlacedTensor d_kl;
  const double* k_scale_value = nullptr;
  const double* v_scale_value = nullptr;
  PlacedTensor k_scale_tensor, v_scale_tensor;

 private:
  static CacheScale cache_scale(const double* value, const PlacedTensor& tensor);
};

// How an operation is called: `direct` runs that backend's stages with unchecked parameters, null the public API.
// Outputs hold `fill` before the call, and a call of the public API that throws must have left it there.
struct Call {
  const Inputs& in;
  const Backend* direct = nullptr;
  unsigned char fill = kFill;
};

SelectParams select_params(const Inputs& in, const Tensor* indices, const Tensor* index_lse);

Results select(const Call& call);                               // indices, index_lse
Results attend(const Call& call, const PlacedTensor& indices);  // out, lse
Results backward(const Call& call, const PlacedTensor& indices, const PlacedTensor& out, const PlacedTensor& lse);
Results msa(const Call& call, bool warmup);  // out, lse, [indices,] index_lse, kl
// `forward` holds what msa gave. d_q, d_k, d_v, kl and, unless the index branch is float8, d_index_q, d_index_k.
Results msa_backward(const Call& call, bool warmup, const Results& forward);
Results paged_msa(const Call& call);                          // out, lse, indices
Results mass(const Call& call, const PlacedTensor& indices);  // share, best
Results combine(const Call& call);                            // out, lse
Results append(const Call& call);                             // k_cache, v_cache, index_k_cache

// The operation's name in Backend::operations(), for the case's kind.
std::string operation_name(const Case& c, const std::string& op);

}  // namespace openmsa::cases
