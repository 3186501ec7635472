// Checks of what Python hands in: they name the operation and the argument, and reach Python as
// ValueError.
#pragma once

#include <stdexcept>
#include <string>

namespace pagemill {

inline void check(bool ok, const char* op, const char* argument, const char* rule) {
  if (!ok) throw std::invalid_argument(std::string(op) + ": " + argument + " " + rule);
}

}  // namespace pagemill
