#include "client/ctl/tar_gz_writer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

constexpr size_t kBlockBytes = 512;
// An archive ends with two blocks of zeros.
constexpr size_t kEndBytes = 2 * kBlockBytes;
// The most that one call of zlib takes.
constexpr size_t kPartBytesMax = 1 << 20;

// The header of POSIX.1-1988 (ustar). Numbers are octal digits that end with a
// zero byte.
struct Header {
  char name[100];
  char mode[8];
  char uid[8];
  char gid[8];
  char size[12];
  char mtime[12];
  char checksum[8];
  char type;
  char link_name[100];
  char magic[6];
  char version[2];
  char user[32];
  char group[32];
  char device_major[8];
  char device_minor[8];
  char prefix[155];
  char padding[12];
};
static_assert(sizeof(Header) == kBlockBytes);

template <size_t kBytes>
void SetOctal(uint64_t value, char (&field)[kBytes]) {
  const std::string digits =
      absl::StrFormat("%0*o", static_cast<int>(kBytes - 1), value);
  std::memcpy(field, digits.c_str(), kBytes);
}

Header MakeHeader(const std::string& name, uint64_t bytes, absl::Time at) {
  Header header = {};
  std::memcpy(header.name, name.data(), name.size());
  SetOctal(0600, header.mode);
  SetOctal(0, header.uid);
  SetOctal(0, header.gid);
  SetOctal(bytes, header.size);
  SetOctal(static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixSeconds(at), 0)),
           header.mtime);
  header.type = '0';  // a regular file
  std::memcpy(header.magic, "ustar", 6);
  std::memcpy(header.version, "00", 2);
  // The sum counts its own field as spaces.
  std::memset(header.checksum, ' ', sizeof(header.checksum));
  std::array<unsigned char, kBlockBytes> block;
  std::memcpy(block.data(), &header, block.size());
  uint64_t sum = 0;
  for (const unsigned char byte : block) sum += byte;
  const std::string digits = absl::StrFormat("%06o", sum);
  std::memcpy(header.checksum, digits.c_str(), 7);
  return header;
}

bool IsFit(const std::string& name) {
  return !name.empty() && name.size() <= sizeof(Header::name) &&
         name.front() != '/' && name.back() != '/' &&
         !absl::StrContains(absl::StrCat("/", name, "/"), "/../");
}

}  // namespace

absl::StatusOr<std::unique_ptr<TarGzWriter>> TarGzWriter::Make(UniqueFd fd,
                                                               absl::Time at) {
  const gzFile file = ::gzdopen(fd.get(), "wb");
  if (file == nullptr) {
    return absl::ResourceExhaustedError("no memory to compress an archive");
  }
  (void)fd.release();  // zlib closes it
  return std::unique_ptr<TarGzWriter>(new TarGzWriter(file, at));
}

TarGzWriter::~TarGzWriter() {
  if (file_ != nullptr) (void)::gzclose_w(file_);
}

absl::Status TarGzWriter::Write(absl::string_view bytes) {
  while (!bytes.empty()) {
    const absl::string_view part = bytes.substr(0, kPartBytesMax);
    errno = 0;
    const int written =
        ::gzwrite(file_, part.data(), static_cast<unsigned>(part.size()));
    if (written != static_cast<int>(part.size())) {
      return OsError(errno, "write the archive");
    }
    bytes.remove_prefix(part.size());
  }
  return absl::OkStatus();
}

absl::Status TarGzWriter::Add(const std::string& name,
                              absl::string_view content) {
  if (!IsFit(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", name, "\" is no name for a file of an archive"));
  }
  const Header header = MakeHeader(name, content.size(), at_);
  OPTSTATE_RETURN_IF_ERROR(
      Write({reinterpret_cast<const char*>(&header), sizeof(header)}));
  OPTSTATE_RETURN_IF_ERROR(Write(content));
  const size_t rest = content.size() % kBlockBytes;
  return Write(std::string(rest == 0 ? 0 : kBlockBytes - rest, '\0'));
}

absl::Status TarGzWriter::Finish() {
  OPTSTATE_RETURN_IF_ERROR(Write(std::string(kEndBytes, '\0')));
  errno = 0;
  if (::gzclose_w(std::exchange(file_, nullptr)) == Z_OK) {
    return absl::OkStatus();
  }
  return OsError(errno, "write the archive");
}

}  // namespace optstate::ctl
