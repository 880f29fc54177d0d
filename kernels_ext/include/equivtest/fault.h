// What a kernel found wrong with the values of a row. Kernels return it; the binding turns it into an exception.
#pragma once

namespace equivtest {

struct Fault {
  const char* problem = nullptr;  // null: the row is fine
  double value = 0;               // the offending value
  explicit operator bool() const { return problem != nullptr; }
};

}  // namespace equivtest
