// The text behind mok_last_error.
#ifndef MOK_HOST_ERROR_H_
#define MOK_HOST_ERROR_H_

#include <string>

#include "mok.h"

namespace mok {

// Keeps `what` for this thread's mok_last_error and returns `status`.
MokStatus fail(MokStatus status, const std::string& what);

}  // namespace mok

#endif  // MOK_HOST_ERROR_H_
