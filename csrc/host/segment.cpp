// Shared memory of the host engine: anonymous files (memfd) that peers open through /proc. They
// have no names to leak when a rank is killed, and no /dev/shm limit.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "error.h"

namespace {

struct Mapping {
  int64_t bytes;
  int fd;  // -1: opened from a peer
};

struct Handle {
  int64_t bytes;
  int32_t pid;
  int32_t fd;
};
static_assert(sizeof(Handle) <= MOK_HANDLE_BYTES);

std::mutex mutex;
std::map<void*, Mapping> mappings;

MokStatus system_error(const std::string& doing) {
  return mok::fail(MOK_ERR_SYSTEM, doing + ": " + std::strerror(errno));
}

MokStatus map_file(int fd, int64_t bytes, bool keep, void** segment) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    const MokStatus status = system_error("mapping " + std::to_string(bytes) + " bytes");
    close(fd);
    return status;
  }
  if (!keep) close(fd);
  const std::lock_guard<std::mutex> lock(mutex);
  mappings[address] = Mapping{bytes, keep ? fd : -1};
  *segment = address;
  return MOK_OK;
}

MokStatus unmap(void* segment) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(segment);
  if (found == mappings.end()) {
    return mok::fail(MOK_ERR_INVALID_ARGUMENT, "not a segment, or closed before");
  }
  munmap(segment, found->second.bytes);
  if (found->second.fd >= 0) close(found->second.fd);
  mappings.erase(found);
  return MOK_OK;
}

}  // namespace

extern "C" {

MokStatus mok_segment_alloc(int64_t bytes, void** segment) {
  const int fd = memfd_create("mok", MFD_CLOEXEC);
  if (fd < 0) return system_error("creating shared memory");
  if (ftruncate(fd, bytes) != 0) {
    const MokStatus status = system_error("sizing " + std::to_string(bytes) + " bytes");
    close(fd);
    return status;
  }
  return map_file(fd, bytes, true, segment);
}

MokStatus mok_segment_export(void* segment, uint8_t* handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(segment);
  if (found == mappings.end() || found->second.fd < 0) {
    return mok::fail(MOK_ERR_INVALID_ARGUMENT, "only a segment of this process can be exported");
  }
  const Handle h{found->second.bytes, getpid(), found->second.fd};
  std::memset(handle, 0, MOK_HANDLE_BYTES);
  std::memcpy(handle, &h, sizeof(h));
  return MOK_OK;
}

MokStatus mok_segment_open(const uint8_t* handle, void** segment) {
  Handle h;
  std::memcpy(&h, handle, sizeof(h));
  const std::string path = "/proc/" + std::to_string(h.pid) + "/fd/" + std::to_string(h.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return system_error("opening the memory of process " + std::to_string(h.pid) +
                        " (ranks must share a host, a user and a PID namespace)");
  }
  return map_file(fd, h.bytes, false, segment);
}

MokStatus mok_segment_close(void* segment) { return unmap(segment); }
MokStatus mok_segment_free(void* segment) { return unmap(segment); }

}  // extern "C"
