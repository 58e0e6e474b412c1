// Ctrl-C, SIGTERM and SIGHUP end the command at once, with 128 + the signal's number, and without the file that it was
// about to write.
#pragma once

#include <string>

namespace openmsa::cli {

void handle_interrupts();

// The file that an interrupt removes, one at a time; an empty path = none. The path is remembered before the file is
// made, so that no moment is left in between.
void remove_on_interrupt(const std::string& path);

}  // namespace openmsa::cli
