// openmsa attend: MSA attention over the tensors of a file, into another file.
#include <cmath>
#include <cstdio>

#include "api/dtype.h"
#include "cli/backends.h"
#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "cli/safetensors.h"

namespace openmsa::cli {
namespace {

struct Input {
  const char* name;
  const char* shape;
  int32_t rank;
  bool required;
};
constexpr Input kInputs[] = {
    {"q", "[Tq, Hq, D]", 3, true},         {"k", "[Tk, Hkv, D]", 3, true},        {"v", "[Tk, Hkv, Dv]", 3, true},
    {"index_q", "[Tq, Hi, Di]", 3, true},  {"index_k", "[Tk, Hik, Di]", 3, true}, {"cu_seqlens_q", "[B + 1]", 1, false},
    {"cu_seqlens_k", "[B + 1]", 1, false}, {"k_starts", "[B]", 1, false},
};

// Shapes as far as the sizes of the outputs depend on them; the operation checks the rest.
const StoredTensor* find_input(const SafetensorsFile& file, const Input& input) {
  const StoredTensor* stored = file.find(input.name);
  if (stored == nullptr) {
    if (!input.required) return nullptr;
    std::vector<std::string> names;
    for (const StoredTensor& tensor : file.tensors()) {
      if (names.size() == 12) {
        names.emplace_back("...");
        break;
      }
      names.push_back(printable(tensor.name));
    }
    fail_input("{}: {}: missing, expected a tensor {}; the file has: {}", file.path(), input.name, input.shape,
               names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", ")));
  }
  if (dtype_of_safetensors(stored->type) < 0) {
    fail_input("{}: {}: got type {}, expected F32, F16 or BF16 (index_q and index_k: or F8_E4M3; offsets: I32)",
               file.path(), input.name, stored->type);
  }
  if (static_cast<int32_t>(stored->shape.size()) != input.rank) {
    fail_input("{}: {}: got a tensor of {} axes, expected {}", file.path(), input.name, stored->shape.size(),
               input.shape);
  }
  return stored;
}

void mention_unused(const SafetensorsFile& file) {
  int unused = 0;
  for (const StoredTensor& tensor : file.tensors()) {
    bool used = false;
    for (const Input& input : kInputs) used = used || tensor.name == input.name;
    if (!used && unused++ == 0) {
      (void)std::fputs(
          fmt::format("openmsa attend: note: {}: tensor {} is not used\n", file.path(), printable(tensor.name)).c_str(),
          stderr);
    }
  }
  if (unused > 1)
    (void)std::fputs(fmt::format("openmsa attend: note: nor are {} others\n", unused - 1).c_str(), stderr);
}

}  // namespace

int run_attend(const AttendOptions& options) {
  const BackendInfo backend = choose_backend(options.backend, {"msa_attention"});
  Device& device = device_of(backend);
  const SafetensorsFile file(options.input);
  const StoredTensor* stored[std::size(kInputs)];
  for (size_t i = 0; i < std::size(kInputs); ++i) stored[i] = find_input(file, kInputs[i]);
  mention_unused(file);

  const StoredTensor &q = *stored[0], &v = *stored[2], &index_q = *stored[3];
  const int64_t tokens = q.shape[0], heads = q.shape[1], index_heads = index_q.shape[1];
  const int32_t type = dtype_of_safetensors(q.type);
  const Shape out_shape{tokens, heads, v.shape[2]}, lse_shape{heads, tokens}, index_lse_shape{index_heads, tokens};
  const Shape indices_shape{index_heads, tokens, options.topk};

  int64_t bytes = 0;
  const auto count = [&](const char* name, int64_t more) {
    if (__builtin_add_overflow(bytes, more, &bytes))
      fail_input("{}: 64 bits cannot count the bytes of all tensors", name);
  };
  for (const StoredTensor* tensor : stored) {
    if (tensor != nullptr) count(tensor->name.c_str(), tensor->end - tensor->begin);
  }
  count("out", bytes_of("out", type, out_shape));
  count("lse", bytes_of("lse", OPENMSA_FLOAT32, lse_shape));
  count("indices", bytes_of("indices", OPENMSA_INT32, indices_shape));
  count("index_lse", bytes_of("index_lse", OPENMSA_FLOAT32, index_lse_shape));
  require_memory(host_device(), bytes, options.input);
  if (&device != &host_device()) require_memory(device, bytes, options.input);

  // Before the work, so that it is not done for a place that cannot be written.
  OutputFile output(options.output, &file.descriptor());
  Progress progress;
  progress.say("reading " + options.input);
  Array inputs[std::size(kInputs)];
  for (size_t i = 0; i < std::size(kInputs); ++i) {
    if (stored[i] == nullptr) continue;
    Array array = make_array(host_device(), dtype_of_safetensors(stored[i]->type), stored[i]->shape);
    file.read(*stored[i], array.tensor.data);
    inputs[i] = &device == &host_device() ? std::move(array) : copy_to(device, array);
  }
  const Array out = make_array(device, type, out_shape), lse = make_array(device, OPENMSA_FLOAT32, lse_shape);
  const Array indices = make_array(device, OPENMSA_INT32, indices_shape);
  const Array index_lse = make_array(device, OPENMSA_FLOAT32, index_lse_shape);

  MsaAttentionArgs args;
  args.q = inputs[0].pointer();
  args.k = inputs[1].pointer();
  args.v = inputs[2].pointer();
  args.index_q = inputs[3].pointer();
  args.index_k = inputs[4].pointer();
  args.sequences = {inputs[5].pointer(), inputs[6].pointer(), inputs[7].pointer()};
  args.selection = {options.topk, options.init_blocks, options.local_blocks};
  args.block_size = options.block_size;
  args.scale = options.scale ? &*options.scale : nullptr;
  args.index_scale = options.index_scale ? &*options.index_scale : nullptr;
  args.execution.stream = device.stream();
  args.out = out.pointer();
  args.lse = lse.pointer();
  args.indices = indices.pointer();
  args.index_lse = index_lse.pointer();
  progress.say(fmt::format("attention of {} queries on {}", tokens, backend.name));
  use_backend(backend);
  try {
    msa_attention(args);
    device.synchronize();
  } catch (const Error& error) {
    fail_input("{}: {}", options.input, error.what());
  }

  progress.say("writing " + options.output);
  const auto scale_text = [](const std::optional<double>& scale, int64_t dim) {
    return fmt::format("{}", scale.value_or(1.0 / std::sqrt(static_cast<double>(dim))));
  };
  const Metadata metadata{{"openmsa_version", ::openmsa_version()},
                          {"backend", backend.name},
                          {"topk", fmt::format("{}", options.topk)},
                          {"block_size", fmt::format("{}", options.block_size)},
                          {"init_blocks", fmt::format("{}", options.init_blocks)},
                          {"local_blocks", fmt::format("{}", options.local_blocks)},
                          {"scale", scale_text(options.scale, q.shape[2])},
                          {"index_scale", scale_text(options.index_scale, index_q.shape[2])}};
  const auto on_host = [&](const Array& array) {
    return &device == &host_device() ? array : copy_to(host_device(), array);
  };
  const Array results[] = {on_host(out), on_host(lse), on_host(indices), on_host(index_lse)};
  const std::vector<NamedTensor> named{{"out", results[0].tensor},
                                       {"lse", results[1].tensor},
                                       {"indices", results[2].tensor},
                                       {"index_lse", results[3].tensor}};
  output.write(make_safetensors_header(named, metadata));
  for (const Array& result : results) output.write(result.tensor.data, result.bytes());
  output.commit();
  return kSuccess;
}

}  // namespace openmsa::cli
