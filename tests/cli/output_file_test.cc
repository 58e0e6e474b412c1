// Files that appear whole or not at all.
#include "cli/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "cli/errors.h"

namespace openmsa::cli {
namespace {

namespace fs = std::filesystem;

class OutputFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/openmsa_output_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  void put(const char* name, const std::string& text) const { std::ofstream(path(name)) << text; }
  std::string content(const char* name) const {
    std::ifstream file(path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  auto files() const { return std::distance(fs::directory_iterator(folder_), {}); }

  fs::path folder_;
};

TEST_F(OutputFileTest, AppearsWithCommit) {
  put("y", "old");
  {
    OutputFile file(path("y"));
    file.write("new");
    EXPECT_EQ(content("y"), "old");
    file.commit();
  }
  EXPECT_EQ(content("y"), "new");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, LeavesNothingWithoutCommit) {
  put("y", "old");
  {
    OutputFile file(path("y")), other(path("z"));
    file.write("new");
  }
  EXPECT_EQ(content("y"), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(OutputFileTest, KeepsTheModeAndTheLink) {
  put("real", "old");
  ASSERT_EQ(::chmod(path("real").c_str(), 0640), 0);
  fs::create_symlink("real", path("link"));
  OutputFile file(path("link"));
  file.write("new");
  file.commit();
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content("real"), "new");
  struct stat status {};
  ASSERT_EQ(::stat(path("real").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640U);
}

TEST_F(OutputFileTest, RefusesTheInputByAnyName) {
  put("x", "input");
  fs::create_symlink("x", path("link"));
  fs::create_hard_link(path("x"), path("hard"));
  const Descriptor input(::open(path("x").c_str(), O_RDONLY));
  for (const char* name : {"x", "link", "hard"}) EXPECT_THROW(OutputFile(path(name), &input), InputError) << name;
  EXPECT_EQ(content("x"), "input");
  EXPECT_EQ(files(), 3);
}

TEST_F(OutputFileTest, RefusesWhatIsNoFile) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& name : {path("pipe"), folder_.string(), path("no/folder"), std::string("/dev/null")}) {
    EXPECT_THROW(OutputFile{name}, InputError) << name;
  }
}

}  // namespace
}  // namespace openmsa::cli
