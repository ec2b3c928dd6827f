#ifndef OPTSTATE_SERVER_ADMIN_HTTP2_FRAMES_H_
#define OPTSTATE_SERVER_ADMIN_HTTP2_FRAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace optstate::admin {

// Follows one direction of an HTTP/2 connection by its frame headers, without
// looking at the frames' payloads.
//
// Threads: one at a time.
class Http2Frames {
 public:
  // Limit of a call's metadata, compressed: HEADERS and CONTINUATION together.
  // gRPC takes 8 KiB, uncompressed.
  static constexpr uint32_t kHeaderBlockBytesMax = 16 << 10;

  // A client's direction begins with the connection's preface.
  enum class Sender { kClient, kServer };
  explicit Http2Frames(Sender sender);

  // Takes the next bytes. INVALID_ARGUMENT: no preface; RESOURCE_EXHAUSTED: a
  // client's header block has more than kHeaderBlockBytesMax. Both are detected
  // before the offending bytes have been passed on.
  absl::Status Take(absl::string_view bytes);

  // Number of frames that have begun.
  uint64_t frame_count() const { return frame_count_; }
  // Returns whether the bytes so far end where a frame may begin.
  bool at_boundary() const {
    return preface_left_ == 0 && header_.empty() && payload_left_ == 0;
  }
  // The stream whose header block ended last; 0: none.
  uint32_t opened_stream() const { return opened_stream_; }

 private:
  absl::Status BeginFrame();
  void EndFrame();

  const Sender sender_;
  size_t preface_left_;
  std::string header_;  // the frame's, as far as it has arrived
  uint32_t payload_left_ = 0;
  uint8_t type_ = 0;
  uint8_t flags_ = 0;
  uint32_t stream_ = 0;
  uint32_t block_bytes_ = 0;
  uint64_t frame_count_ = 0;
  uint32_t opened_stream_ = 0;
};

// The SETTINGS frame that a server sends on a connection that it refuses.
std::string SettingsFrame();
std::string SettingsAckFrame();
// A GOAWAY frame with ENHANCE_YOUR_CALM and the reason `why`.
std::string GoAwayFrame(uint32_t last_stream, absl::string_view why);
// The answer of a gRPC call that failed before it began.
std::string TrailersOnlyFrame(uint32_t stream, const absl::Status& status);

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_HTTP2_FRAMES_H_
