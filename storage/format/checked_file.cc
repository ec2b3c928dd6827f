#include "storage/format/checked_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "proto/types/unique_fd.h"
#include "storage/format/checksum.h"
#include "storage/format/sealed_header.h"

namespace optstate::storage {
namespace {

constexpr uint64_t kMagic = 0x31424f4a54504f53;  // "SOPTJOB1"
constexpr uint32_t kVersion = 1;
constexpr size_t kHashBytes = 32;

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved0;
  uint64_t incarnation;
  uint64_t payload_bytes;
  uint8_t layout_hash[kHashBytes];
  uint32_t payload_crc32c;
  uint32_t header_crc32c;  // see sealed_header.h
};
static_assert(sizeof(Header) == 72);
static_assert(offsetof(Header, incarnation) == 16);
static_assert(offsetof(Header, layout_hash) == 32);
static_assert(offsetof(Header, payload_crc32c) == 64);
static_assert(offsetof(Header, header_crc32c) == 68);

absl::Status WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return OsError(errno, "write");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status ReadAll(int fd, char* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t got = ::read(fd, data, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return OsError(errno, "read");
    if (got == 0) return absl::DataLossError("the file ends too early");
    data += got;
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::Status CheckHeader(const Header& header, uint64_t file_bytes) {
  if (header.magic != kMagic) {
    return absl::DataLossError(absl::StrFormat(
        "magic is %016x, expected %016x: this is not a job description",
        header.magic, kMagic));
  }
  if (header.version != kVersion) {
    return absl::DataLossError(
        absl::StrCat("format version is ", header.version,
                     ", this optstated reads version ", kVersion));
  }
  if (!IsSealed(header)) {
    return absl::DataLossError("the header's checksum is wrong");
  }
  if (header.payload_bytes > kCheckedFilePayloadBytesMax ||
      header.payload_bytes + sizeof(Header) != file_bytes) {
    return absl::DataLossError(
        absl::StrCat("the file has ", file_bytes, " bytes, its header says ",
                     header.payload_bytes, " + ", sizeof(Header)));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckedFile> ReadOpenFile(int fd) {
  struct stat file_stat;
  if (::fstat(fd, &file_stat) != 0) return OsError(errno, "fstat");
  Header header;
  OPTSTATE_RETURN_IF_ERROR(
      ReadAll(fd, reinterpret_cast<char*>(&header), sizeof(header)));
  OPTSTATE_RETURN_IF_ERROR(
      CheckHeader(header, static_cast<uint64_t>(file_stat.st_size)));
  CheckedFile file;
  file.payload.resize(header.payload_bytes);
  OPTSTATE_RETURN_IF_ERROR(
      ReadAll(fd, file.payload.data(), file.payload.size()));
  if (Crc32c(file.payload.data(), file.payload.size()) !=
      header.payload_crc32c) {
    return absl::DataLossError("the payload's checksum is wrong");
  }
  file.incarnation = header.incarnation;
  file.layout_hash.assign(reinterpret_cast<const char*>(header.layout_hash),
                          kHashBytes);
  return file;
}

absl::Status WriteTemporary(const std::string& path, const Header& header,
                            absl::string_view payload) {
  UniqueFd fd(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  OPTSTATE_RETURN_IF_ERROR(WriteAll(
      fd.get(), absl::string_view(reinterpret_cast<const char*>(&header),
                                  sizeof(header))));
  OPTSTATE_RETURN_IF_ERROR(WriteAll(fd.get(), payload));
  if (::fsync(fd.get()) != 0) return OsError(errno, "fsync");
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteCheckedFile(const std::string& path,
                              const CheckedFile& file) {
  if (file.layout_hash.size() != kHashBytes ||
      file.payload.size() > kCheckedFilePayloadBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": a layout hash of ", file.layout_hash.size(),
        " bytes and a payload of ", file.payload.size(), " bytes"));
  }
  Header header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.incarnation = file.incarnation;
  header.payload_bytes = file.payload.size();
  std::memcpy(header.layout_hash, file.layout_hash.data(), kHashBytes);
  header.payload_crc32c = Crc32c(file.payload.data(), file.payload.size());
  Seal(&header);
  const std::string temporary = path + ".tmp";
  const absl::Status written = WriteTemporary(temporary, header, file.payload);
  if (!written.ok()) {
    ::unlink(temporary.c_str());
    return Annotate(written, path);
  }
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    return OsError(error, absl::StrCat("rename to ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckedFile> ReadCheckedFile(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  absl::StatusOr<CheckedFile> file = ReadOpenFile(fd.get());
  if (!file.ok()) return Annotate(file.status(), path);
  return file;
}

}  // namespace optstate::storage
