#ifndef OPTSTATE_PROTO_TYPES_LOAD_END_H_
#define OPTSTATE_PROTO_TYPES_LOAD_END_H_

#include <cstdint>
#include <optional>

namespace optstate {

// A job takes no step of this number or above.
inline constexpr uint64_t kBeginAtStepEnd = uint64_t{1} << 63;

// The beginning of a job that takes over the state of another one, which was at
// this step after this many loads.
struct BeginAt {
  uint64_t step = 0;            // below kBeginAtStepEnd
  uint32_t loads_finished = 1;  // not 0

  bool operator==(const BeginAt&) const = default;
};

// The end of a load, as a rank announces it; see v1::FinishLoadRequest.
struct LoadEnd {
  uint64_t content_digest = 0;  // 0: not given
  std::optional<BeginAt> begin_at = std::nullopt;
};

// Makes one of the numbers of a message, in which 0 stands for what is not
// given.
inline LoadEnd MakeLoadEnd(uint64_t content_digest, uint64_t begin_at_step,
                           uint32_t begin_at_loads) {
  LoadEnd end;
  end.content_digest = content_digest;
  if (begin_at_step != 0 || begin_at_loads != 0) {
    end.begin_at = BeginAt{begin_at_step, begin_at_loads};
  }
  return end;
}

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_LOAD_END_H_
