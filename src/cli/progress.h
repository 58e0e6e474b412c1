// What a person sees of work that takes more than a few seconds: a line on stderr that says what is being done and for
// how long. On a terminal it comes after 2 s and is rewritten every half second, elsewhere every 15 s has one.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace openmsa::cli {

class Progress {
 public:
  Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

  // What is being done from now on.
  void say(const std::string& text);
  // Writes a line to stdout, clear of the progress line.
  void print(const std::string& line);

 private:
  void run();
  void clear();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::string text_;
  bool ended_ = false;
  bool shown_ = false;  // a line of ours stands on the terminal
  const bool terminal_;
  std::thread thread_;
};

}  // namespace openmsa::cli
