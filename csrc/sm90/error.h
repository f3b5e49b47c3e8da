// Errors of the engine's host side, and the text behind mok_last_error.
#ifndef MOK_SM90_ERROR_H_
#define MOK_SM90_ERROR_H_

#include <cuda_runtime.h>

#include <string>

#include "mok.h"

namespace mok::sm90 {

struct Error {
  MokStatus status;
  std::string what;
};

// Throws MOK_ERR_SYSTEM with the runtime's reason.
void check_cuda(cudaError_t error, const char* doing);

// Keeps `what` for this thread's mok_last_error and returns `status`.
MokStatus fail(MokStatus status, const std::string& what);

}  // namespace mok::sm90

#endif  // MOK_SM90_ERROR_H_
