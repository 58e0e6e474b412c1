// The header's JSON. Read as events, so that neither its depth nor its size builds anything but the list of tensors.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "api/dtype.h"
#include "cli/errors.h"
#include "cli/safetensors.h"

namespace openmsa::cli {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

struct Type {
  std::string_view name;
  int64_t bits;
  int32_t dtype;  // -1: openmsa has none
};

constexpr std::array kTypes{
    Type{"BOOL", 8, -1},
    Type{"F4", 4, -1},
    Type{"F6_E2M3", 6, -1},
    Type{"F6_E3M2", 6, -1},
    Type{"U8", 8, OPENMSA_UINT8},
    Type{"I8", 8, -1},
    Type{"F8_E5M2", 8, -1},
    Type{"F8_E4M3", 8, OPENMSA_FLOAT8_E4M3},
    Type{"F8_E8M0", 8, -1},
    Type{"F8_E4M3FNUZ", 8, -1},
    Type{"F8_E5M2FNUZ", 8, -1},
    Type{"I16", 16, -1},
    Type{"U16", 16, -1},
    Type{"F16", 16, OPENMSA_FLOAT16},
    Type{"BF16", 16, OPENMSA_BFLOAT16},
    Type{"I32", 32, OPENMSA_INT32},
    Type{"U32", 32, -1},
    Type{"F32", 32, OPENMSA_FLOAT32},
    Type{"C64", 64, -1},
    Type{"F64", 64, -1},
    Type{"I64", 64, OPENMSA_INT64},
    Type{"U64", 64, -1},
};

const Type* find_type(std::string_view name) {
  const auto* const found = std::find_if(kTypes.begin(), kTypes.end(), [&](const Type& t) { return t.name == name; });
  return found == kTypes.end() ? nullptr : &*found;
}

std::string no_json(size_t position) { return fmt::format("the header is no JSON in UTF-8 (byte {} of it)", position); }

// Builds the list from the events of the parser. A function that returns false ends the parse, with the reason in
// fault().
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  SafetensorsHeader take() { return std::move(header_); }
  const std::string& fault() const { return fault_; }

  bool null() override { return unexpected("null"); }
  bool boolean(bool /*value*/) override { return unexpected("a boolean"); }
  bool binary(binary_t& /*value*/) override { return unexpected("binary data"); }
  bool number_integer(number_integer_t value) override { return unexpected(fmt::format("{}", value)); }
  bool number_float(number_float_t /*value*/, const string_t& text) override { return unexpected(printable(text)); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return unexpected(fmt::format("{}", value));
    if (value > static_cast<number_unsigned_t>(kMost)) return unexpected(fmt::format("{}", value));
    if (place_ == Place::shape) {
      tensor().shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (offsets_ == 2) return fail("data_offsets: got more than two numbers, expected [begin, end]");
    (offsets_++ == 0 ? tensor().begin : tensor().end) = static_cast<int64_t>(value);
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::tensor || field_ != kType) return unexpected(printable(value));
    if (find_type(value) == nullptr)
      return fail(fmt::format("dtype: got {}, which is no type of the format", printable(value)));
    tensor().type = std::move(value);
    return true;
  }

  bool start_object(size_t /*size*/) override {
    if (place_ == Place::start) {
      place_ = Place::file;
    } else if (place_ == Place::file && key_ == kMetadataKey) {
      place_ = Place::metadata;
    } else if (place_ == Place::file) {
      place_ = Place::tensor;
      seen_ = 0;
      offsets_ = 0;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::tensor) return start_field(name);
    if (place_ == Place::metadata) {
      if (header_.metadata.contains(name)) return fail(fmt::format("the key {} comes twice", printable(name)));
    } else if (name == kMetadataKey) {
      if (std::exchange(has_metadata_, true)) return fail("__metadata__ comes twice");
    } else {
      header_.tensors.emplace_back().name = name;
    }
    key_ = std::move(name);
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      for (const int field : {kType, kShape, kOffsets}) {
        if ((seen_ & (1 << field)) == 0)
          return fail(fmt::format("{} is missing", kFieldNames[static_cast<size_t>(field)]));
      }
    }
    place_ = place_ == Place::file ? Place::done : Place::file;
    return true;
  }

  bool start_array(size_t /*size*/) override {
    if (place_ != Place::tensor || field_ == kType) return unexpected("a list");
    place_ = field_ == kShape ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() override {
    if (place_ == Place::offsets && offsets_ != 2) {
      return fail(fmt::format("data_offsets: got {} numbers, expected [begin, end]", offsets_));
    }
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string& /*token*/, const nlohmann::detail::exception& /*e*/) override {
    fault_ = no_json(position);
    return false;
  }

 private:
  enum class Place { start, file, metadata, tensor, shape, offsets, done };
  enum Field { kType, kShape, kOffsets };
  static constexpr std::array<std::string_view, 3> kFieldNames{"dtype", "shape", "data_offsets"};
  static constexpr std::string_view kMetadataKey = "__metadata__";

  StoredTensor& tensor() { return header_.tensors.back(); }

  bool start_field(const std::string& name) {
    const auto* const found = std::find(kFieldNames.begin(), kFieldNames.end(), name);
    if (found == kFieldNames.end()) {
      return fail(fmt::format("the key {} is unknown, expected dtype, shape and data_offsets", printable(name)));
    }
    field_ = static_cast<Field>(found - kFieldNames.begin());
    if ((seen_ & (1 << field_)) != 0) return fail(fmt::format("{} comes twice", name));
    seen_ |= 1 << field_;
    return true;
  }

  bool fail(const std::string& reason) {
    const bool in_tensor = place_ == Place::tensor || place_ == Place::shape || place_ == Place::offsets;
    fault_ = in_tensor                   ? fmt::format("tensor {}: {}", printable(tensor().name), reason)
             : place_ == Place::metadata ? "__metadata__: " + reason
                                         : reason;
    return false;
  }

  bool unexpected(const std::string& what) {
    switch (place_) {
      case Place::metadata:
        return fail(fmt::format("{}: got {}, expected a string", printable(key_), what));
      case Place::tensor: {
        const char* expected = field_ == kType ? "a type's name" : "a list of numbers";
        return fail(fmt::format("{}: got {}, expected {}", kFieldNames[field_], what, expected));
      }
      case Place::shape:
      case Place::offsets:
        return fail(fmt::format("{}: got {}, expected integers from 0 to 2^63 - 1", kFieldNames[field_], what));
      default:
        return fail(fmt::format("{}: got {}, expected an object", printable(key_), what));
    }
  }

  SafetensorsHeader header_;
  std::string fault_;
  Place place_ = Place::start;
  std::string key_;
  Field field_ = kType;
  int seen_ = 0;     // bits of the fields that the tensor has had
  int offsets_ = 0;  // numbers of its data_offsets so far
  bool has_metadata_ = false;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t axis = 0; axis < std::min(shape.size(), kShown); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  }
  return "[" + text + (shape.size() > kShown ? ", ...]" : "]");
}

void check_size(const StoredTensor& tensor) {
  const auto fail = [&](const std::string& reason) { fail_input("tensor {}: {}", printable(tensor.name), reason); };
  int64_t bits = find_type(tensor.type)->bits;
  for (const int64_t length : tensor.shape) {
    if (__builtin_mul_overflow(bits, length, &bits)) {
      fail(fmt::format("shape: got {}, more than 64 bits can count", shape_text(tensor.shape)));
    }
  }
  if (tensor.begin > tensor.end) {
    fail(fmt::format("data_offsets: got [{}, {}], which ends before it begins", tensor.begin, tensor.end));
  }
  if (bits % 8 != 0 || tensor.end - tensor.begin != bits / 8) {
    fail(fmt::format("data_offsets: got {} bytes, expected {} for {} of shape {}", tensor.end - tensor.begin,
                     static_cast<double>(bits) / 8, tensor.type, shape_text(tensor.shape)));
  }
}

// Every byte of the data belongs to one tensor.
void check_ranges(const std::vector<StoredTensor>& tensors, int64_t data_bytes) {
  std::vector<const StoredTensor*> by_place;
  by_place.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) by_place.push_back(&tensor);
  std::sort(by_place.begin(), by_place.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  int64_t expected = 0;
  for (const StoredTensor* tensor : by_place) {
    if (tensor->end > data_bytes) {
      fail_input("tensor {}: data_offsets: got [{}, {}], but {} bytes follow the header", printable(tensor->name),
                 tensor->begin, tensor->end, data_bytes);
    }
    if (tensor->begin != expected) {
      fail_input("tensor {}: data_offsets: got [{}, {}], which {} (the tensor before it ends at {})",
                 printable(tensor->name), tensor->begin, tensor->end,
                 tensor->begin < expected ? "overlaps another tensor" : "leaves a hole", expected);
    }
    expected = tensor->end;
  }
  if (expected != data_bytes) {
    fail_input("{} bytes follow the header, but its tensors end at {}", data_bytes, expected);
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t data_bytes) {
  // The parser takes a zero byte for the end of its input, and would not look at what follows.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) throw InputError(no_json(zero + 1));
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) throw InputError(reader.fault());
  SafetensorsHeader header = reader.take();
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                                        [](const StoredTensor& a, const StoredTensor& b) { return a.name == b.name; });
  if (twice != header.tensors.end()) fail_input("tensor {} comes twice", printable(twice->name));
  for (const StoredTensor& tensor : header.tensors) check_size(tensor);
  check_ranges(header.tensors, data_bytes);
  return header;
}

int32_t dtype_of_safetensors(std::string_view type) {
  const Type* found = find_type(type);
  return found == nullptr ? -1 : found->dtype;
}

std::string make_safetensors_header(const std::vector<NamedTensor>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t begin = 0;
  for (const NamedTensor& named : tensors) {
    const Tensor& tensor = named.tensor;
    const auto* const type =
        std::find_if(kTypes.begin(), kTypes.end(), [&](const Type& t) { return t.dtype == tensor.dtype; });
    int64_t end = dtype_size(tensor.dtype);
    for (int32_t axis = 0; axis < tensor.rank; ++axis) end *= tensor.shape[axis];
    end += begin;
    header[named.name] = {{"dtype", type->name},
                          {"shape", std::vector<int64_t>(tensor.shape, tensor.shape + tensor.rank)},
                          {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string result;
  for (int byte = 0; byte < 8; ++byte)
    result += static_cast<char>(static_cast<uint64_t>(text.size()) >> (8 * byte) & 0xFF);
  return result + text;
}

}  // namespace openmsa::cli
