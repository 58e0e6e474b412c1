// The reader of safetensors files: what it takes, and how it refuses everything else.
#include "cli/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <vector>

#include "cli/device.h"
#include "cli/errors.h"
#include "cli/memory_file.h"

namespace openmsa::cli {
namespace {

using tests::memory_file;
using tests::safetensors_content;

SafetensorsFile open_content(std::string_view content) { return {memory_file(content), "x.safetensors"}; }

// The message that the content is refused with; "" when it is taken.
std::string refusal(std::string_view content) {
  try {
    open_content(content);
    return "";
  } catch (const InputError& error) {
    return error.what();
  }
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const SafetensorsFile file = open_content(tests::valid_safetensors());
  ASSERT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}}));
  const StoredTensor* count = file.find("count");
  ASSERT_NE(count, nullptr);
  EXPECT_TRUE(count->shape.empty());
  std::vector<unsigned char> bytes(8);
  file.read(*count, bytes.data());
  EXPECT_EQ(bytes, (std::vector<unsigned char>{24, 25, 26, 27, 28, 29, 30, 31}));
  EXPECT_EQ(file.find("q")->shape, (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(file.find("empty")->type, "BF16");
  EXPECT_EQ(file.find("nothing"), nullptr);
}

TEST(Safetensors, ReadsWhatItWrites) {
  const Array half = make_array(host_device(), OPENMSA_FLOAT16, {3, 5}),
              scalar = make_array(host_device(), OPENMSA_INT32, {});
  std::string content =
      make_safetensors_header({{"half", half.tensor}, {"scalar", scalar.tensor}}, {{"scale", "0.5 \"quoted\"\n"}});
  EXPECT_EQ(content.size() % 8, 0U);
  content.append(34, '\7');
  const SafetensorsFile file = open_content(content);
  EXPECT_EQ(file.metadata().at("scale"), "0.5 \"quoted\"\n");
  EXPECT_EQ(file.find("half")->shape, (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(file.find("half")->type, "F16");
  EXPECT_EQ(file.find("scalar")->begin, 30);
}

TEST(Safetensors, TakesAFileWithoutTensors) { EXPECT_EQ(refusal(safetensors_content("{}", 0)), ""); }

TEST(Safetensors, RefusesEveryTruncation) {
  const std::string content = tests::valid_safetensors();
  for (size_t length = 0; length < content.size(); ++length) {
    EXPECT_NE(refusal(std::string_view(content).substr(0, length)), "") << length << " bytes were taken";
  }
  EXPECT_NE(refusal(content + "x"), "") << "a byte too many was taken";
}

struct Hostile {
  const char* name;
  std::string header;
  int64_t data_bytes;
  const char* message;  // part of it
};
void PrintTo(const Hostile& hostile, std::ostream* stream) { *stream << hostile.name; }

std::string tensor(const char* type, const char* shape, const char* offsets) {
  return fmt::format(R"({{"q":{{"dtype":{},"shape":{},"data_offsets":{}}}}})", type, shape, offsets);
}

std::string repeated(const char* text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

std::vector<Hostile> hostile_headers() {
  return {
      Hostile{"no_brace", " {}", 0, "does not start with '{'"},
      Hostile{"a_list", "[]", 0, "does not start with '{'"},
      Hostile{"no_json", "{\"q\": nonsense}", 0, "no JSON"},
      Hostile{"open_end", "{\"q\": {", 0, "no JSON"},
      Hostile{"two_objects", "{}{}", 0, "no JSON"},
      Hostile{"a_comment", "{/**/}", 0, "no JSON"},
      Hostile{"zeros_after", std::string("{}\0\0", 4), 0, "no JSON"},
      Hostile{"no_utf8", "{\"\xff\xfe\": 1}", 0, "no JSON"},
      Hostile{"overlong_utf8", "{\"\xc0\x80\": 1}", 0, "no JSON"},
      Hostile{"deep_lists", "{\"q\": " + std::string(1000000, '['), 0, "expected an object"},
      Hostile{"deep_objects", repeated("{\"a\":", 200000), 0, "expected"},
      Hostile{"a_number", R"({"q": 1})", 0, "got 1, expected an object"},
      Hostile{"null", R"({"q": null})", 0, "got null"},
      Hostile{"unknown_type", tensor("\"F99\"", "[1]", "[0,4]"), 4, "dtype: got 'F99'"},
      Hostile{"type_is_a_number", tensor("7", "[1]", "[0,4]"), 4, "dtype: got 7"},
      Hostile{"shape_is_a_number", tensor("\"F32\"", "1", "[0,4]"), 4, "shape: got 1"},
      Hostile{"shape_in_shape", tensor("\"F32\"", "[[1]]", "[0,4]"), 4, "got a list"},
      Hostile{"negative_shape", tensor("\"F32\"", "[-1]", "[0,4]"), 4, "shape: got -1"},
      Hostile{"fractional_shape", tensor("\"F32\"", "[1.5]", "[0,4]"), 4, "shape: got '1.5'"},
      Hostile{"shape_above_63_bits", tensor("\"F32\"", "[9223372036854775808]", "[0,4]"), 4,
              "shape: got 9223372036854775808"},
      Hostile{"shape_above_64_bits", tensor("\"F32\"", "[99999999999999999999999]", "[0,4]"), 4, "shape: got"},
      Hostile{"shape_overflows", tensor("\"F32\"", "[4294967296,4294967296]", "[0,4]"), 4, "more than 64 bits"},
      Hostile{"shape_overflows_to_zero", tensor("\"F32\"", "[4611686018427387904,4611686018427387904,0]", "[0,0]"), 0,
              "more than 64 bits"},
      Hostile{"size_of_another_shape", tensor("\"F32\"", "[2]", "[0,4]"), 4, "got 4 bytes, expected 8"},
      Hostile{"half_a_byte", tensor("\"F4\"", "[3]", "[0,2]"), 2, "expected 1.5"},
      Hostile{"backwards", tensor("\"U8\"", "[0]", "[4,0]"), 4, "ends before it begins"},
      Hostile{"negative_offset", tensor("\"U8\"", "[4]", "[-4,0]"), 4, "data_offsets: got -4"},
      Hostile{"one_offset", tensor("\"U8\"", "[4]", "[4]"), 4, "data_offsets: got 1"},
      Hostile{"three_offsets", tensor("\"U8\"", "[4]", "[0,4,4]"), 4, "more than two"},
      Hostile{"beyond_the_file", tensor("\"U8\"", "[5]", "[0,5]"), 4, "4 bytes follow"},
      Hostile{"huge_range", tensor("\"U8\"", "[9223372036854775807]", "[0,9223372036854775807]"), 4,
              "more than 64 bits"},
      Hostile{"huge_range_of_bytes", tensor("\"U8\"", "[1000000000000000000]", "[0,1000000000000000000]"), 4,
              "4 bytes follow"},
      Hostile{"a_hole_before", tensor("\"U8\"", "[3]", "[1,4]"), 4, "leaves a hole"},
      Hostile{"a_hole_behind", tensor("\"U8\"", "[3]", "[0,3]"), 4, "its tensors end at 3"},
      Hostile{
          "an_overlap",
          R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
          4, "overlaps"},
      Hostile{
          "the_same_range",
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          4, "overlaps"},
      Hostile{
          "a_name_twice",
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
          4, "comes twice"},
      Hostile{"a_field_twice", R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4,
              "dtype comes twice"},
      Hostile{"a_field_missing", R"({"a":{"dtype":"U8","shape":[4]}})", 4, "data_offsets is missing"},
      Hostile{"an_unknown_field", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}})", 4,
              "'x' is unknown"},
      Hostile{"metadata_is_a_list", R"({"__metadata__":[]})", 0, "got a list"},
      Hostile{"metadata_of_numbers", R"({"__metadata__":{"a":1}})", 0, "expected a string"},
      Hostile{"metadata_twice", R"({"__metadata__":{},"__metadata__":{}})", 0, "comes twice"},
      Hostile{"metadata_key_twice", R"({"__metadata__":{"a":"1","a":"2"}})", 0, "comes twice"},
      Hostile{"a_name_with_controls", R"({"a\u001b[2J\n":7})", 0, "\\x1b"},
      Hostile{"a_long_name", "{\"" + std::string(100000, 'a') + "\":7}", 0, "aaa...'"},
  };
}

class SafetensorsRefuses : public ::testing::TestWithParam<Hostile> {};

TEST_P(SafetensorsRefuses, ByName) {
  const Hostile& hostile = GetParam();
  const std::string message = refusal(safetensors_content(hostile.header, hostile.data_bytes));
  EXPECT_NE(message.find(hostile.message), std::string::npos) << message;
  EXPECT_EQ(message.rfind("x.safetensors: ", 0), 0U) << message;
  EXPECT_LT(message.size(), 400U);
  EXPECT_TRUE(std::all_of(message.begin(), message.end(), [](char c) { return c >= 0x20 && c < 0x7F; })) << message;
}

INSTANTIATE_TEST_SUITE_P(Headers, SafetensorsRefuses, ::testing::ValuesIn(hostile_headers()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(Safetensors, RefusesLengthsOfTheHeader) {
  for (const uint64_t length :
       {~uint64_t{0}, uint64_t{1} << 63, uint64_t{100'000'001}, uint64_t{1'000'000}, uint64_t{0}}) {
    std::string content = safetensors_content("{}", 0);
    for (size_t byte = 0; byte < 8; ++byte) content[byte] = static_cast<char>(length >> (8 * byte) & 0xFF);
    EXPECT_NE(refusal(content), "") << length;
  }
}

TEST(Safetensors, TakesNoMemoryForAHeaderOfZeros) {
  Descriptor file = memory_file(std::string("\x00\xe1\xf5\x05\x00\x00\x00\x00", 8));  // 100,000,000
  ASSERT_EQ(::ftruncate(file.number(), 200'000'000), 0);
  EXPECT_THROW(SafetensorsFile(std::move(file), "x"), InputError);
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  char folder[] = "/tmp/openmsa_safetensors_XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string pipe = std::string(folder) + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path :
       {std::string(folder), pipe, std::string("/dev/zero"), std::string(folder) + "/missing"}) {
    EXPECT_THROW(SafetensorsFile{path}, InputError) << path;
  }
  ::unlink(pipe.c_str());
  ::rmdir(folder);
}

TEST(Safetensors, NoticesAFileThatShrinks) {
  Descriptor file = memory_file(tests::valid_safetensors());
  const int number = file.number();
  const SafetensorsFile opened(std::move(file), "x");
  ASSERT_EQ(::ftruncate(number, 200), 0);
  std::vector<char> bytes(24);
  EXPECT_THROW(opened.read(*opened.find("q"), bytes.data()), InputError);
}

}  // namespace
}  // namespace openmsa::cli
