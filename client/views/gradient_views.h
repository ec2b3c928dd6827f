#ifndef OPTSTATE_CLIENT_VIEWS_GRADIENT_VIEWS_H_
#define OPTSTATE_CLIENT_VIEWS_GRADIENT_VIEWS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace optstate::client {

// A rank's gradient area a second time, for the trainer's own use: a mapping
// that outlives the session, and that can be turned into private memory with
// its values, at the same address, while the session goes on using the area.
//
// Threads: not thread-safe; but any thread may read and write the memory at any
// time, except that a write during Keep may be lost.
class GradientViews {
 public:
  // Maps the pages that hold `area`, a part of a shared mapping. UNIMPLEMENTED
  // where the kernel cannot map shared pages a second time.
  static absl::StatusOr<std::unique_ptr<GradientViews>> Map(
      absl::Span<std::byte> area);
  GradientViews(const GradientViews&) = delete;
  GradientViews& operator=(const GradientViews&) = delete;
  ~GradientViews();

  // The area's bytes in this mapping.
  absl::Span<std::byte> area() const { return area_; }
  // Returns the distance from an address in the session's area to the same byte
  // in this mapping.
  int64_t distance() const { return distance_; }
  // Copies a gradient to a part of the memory, which begins at `to`, bypassing
  // the cache where the engine would not find it there. INVALID_ARGUMENT: the
  // part is outside.
  absl::Status Put(void* to, absl::Span<const std::byte> gradient);
  // Makes the memory private. The given parts of it keep their values, all
  // other bytes become 0. RESOURCE_EXHAUSTED: there is no memory, and nothing
  // has changed; INVALID_ARGUMENT: a part is outside. Idempotent: a second call
  // does nothing.
  absl::Status Keep(absl::Span<const absl::Span<const std::byte>> parts);

 private:
  GradientViews(absl::Span<std::byte> pages, absl::Span<std::byte> area,
                int64_t distance)
      : pages_(pages), area_(area), distance_(distance) {}

  const absl::Span<std::byte> pages_;
  const absl::Span<std::byte> area_;
  const int64_t distance_;
  bool is_private_ = false;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_GRADIENT_VIEWS_H_
