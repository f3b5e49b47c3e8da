// Device memory that ranks map from each other: CUDA IPC, between processes on one GPU or on
// several GPUs of a host. Allocated here and not by torch, whose expandable segments cannot be
// exported.
#include <cstring>

#include "error.h"

namespace {

MokStatus check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return MOK_OK;
  cudaGetLastError();  // or the next launch that asks would report it
  return mok::sm90::fail(MOK_ERR_SYSTEM, std::string(doing) + ": " + cudaGetErrorString(error));
}

static_assert(sizeof(cudaIpcMemHandle_t) == MOK_HANDLE_BYTES);

}  // namespace

extern "C" {

MokStatus mok_segment_alloc(int64_t bytes, void** segment) {
  *segment = nullptr;
  const std::string doing = "allocating " + std::to_string(bytes) + " bytes for peers";
  MokStatus status = check(cudaMalloc(segment, bytes), doing.c_str());
  if (status == MOK_OK) status = check(cudaMemset(*segment, 0, bytes), "clearing peer memory");
  // Peers may write as soon as they have the handle.
  if (status == MOK_OK) status = check(cudaDeviceSynchronize(), "clearing peer memory");
  if (status != MOK_OK && *segment != nullptr) {
    cudaFree(*segment);
    *segment = nullptr;
  }
  return status;
}

MokStatus mok_segment_export(void* segment, uint8_t* handle) {
  cudaIpcMemHandle_t ipc;
  const MokStatus status = check(cudaIpcGetMemHandle(&ipc, segment), "exporting peer memory");
  if (status == MOK_OK) std::memcpy(handle, &ipc, sizeof(ipc));
  return status;
}

MokStatus mok_segment_open(const uint8_t* handle, void** segment) {
  cudaIpcMemHandle_t ipc;
  std::memcpy(&ipc, handle, sizeof(ipc));
  return check(cudaIpcOpenMemHandle(segment, ipc, cudaIpcMemLazyEnablePeerAccess),
               "mapping a peer's memory (are the GPUs connected, and do the ranks share a host?)");
}

MokStatus mok_segment_close(void* segment) {
  return check(cudaIpcCloseMemHandle(segment), "unmapping a peer's memory");
}

MokStatus mok_segment_free(void* segment) {
  return check(cudaFree(segment), "freeing peer memory");
}

}  // extern "C"
