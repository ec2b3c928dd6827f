#include "server/session/durability/durable_job.h"

#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace optstate::session {
namespace {

struct Header {
  uint64_t description_bytes;
  uint64_t step_counts;
  uint64_t scalars;
  storage::StepRecord record;
};

uint64_t BytesOf(const Header& header) {
  return sizeof(Header) + header.description_bytes +
         header.step_counts * sizeof(int64_t) + header.scalars * sizeof(double);
}

}  // namespace

uint64_t DurableJobBytes(const Layout& layout, absl::string_view description) {
  return BytesOf({.description_bytes = description.size(),
                  .step_counts = layout.parameters().size(),
                  .scalars = layout.parameters().size(),
                  .record = {}});
}

namespace {

void Serialize(absl::string_view description, const storage::StepRecord& record,
               absl::Span<const int64_t> counts,
               absl::Span<const double> scalars, std::string* bytes) {
  const Header header = {.description_bytes = description.size(),
                         .step_counts = counts.size(),
                         .scalars = scalars.size(),
                         .record = record};
  bytes->clear();
  bytes->reserve(BytesOf(header));
  bytes->append(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes->append(description.data(), description.size());
  bytes->append(reinterpret_cast<const char*>(counts.data()),
                counts.size() * sizeof(int64_t));
  bytes->append(reinterpret_cast<const char*>(scalars.data()),
                scalars.size() * sizeof(double));
}

}  // namespace

void SerializeDurableJob(absl::string_view description,
                         const storage::StepRecord& record,
                         const storage::StateStore& store, std::string* bytes) {
  Serialize(description, record, store.step_counts(), store.scalars(), bytes);
}

std::string SerializeDurableJob(const DurableJob& job) {
  std::string bytes;
  Serialize(job.description, job.record, job.step_counts, job.scalars, &bytes);
  return bytes;
}

absl::StatusOr<DurableJob> ParseDurableJob(absl::string_view bytes) {
  Header header;
  const auto damaged = [&] {
    return absl::DataLossError(absl::StrCat(
        "commits: ", bytes.size(), " bytes are not what a job writes"));
  };
  if (bytes.size() < sizeof(header)) return damaged();
  std::memcpy(&header, bytes.data(), sizeof(header));
  // Each is checked by itself first, so that their sum cannot wrap.
  if (header.description_bytes > bytes.size() ||
      header.step_counts > bytes.size() || header.scalars > bytes.size() ||
      BytesOf(header) != bytes.size()) {
    return damaged();
  }
  DurableJob job;
  job.record = header.record;
  const char* next = bytes.data() + sizeof(header);
  job.description.assign(next, header.description_bytes);
  next += header.description_bytes;
  const auto take = [&next](auto* numbers, uint64_t count) {
    numbers->resize(count);
    const uint64_t size = count * sizeof(numbers->front());
    if (size > 0) std::memcpy(numbers->data(), next, size);
    next += size;
  };
  take(&job.step_counts, header.step_counts);
  take(&job.scalars, header.scalars);
  return job;
}

}  // namespace optstate::session
