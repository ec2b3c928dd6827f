#ifndef OPTSTATE_STORAGE_TIERS_NVME_FRAME_LIST_H_
#define OPTSTATE_STORAGE_TIERS_NVME_FRAME_LIST_H_

#include <cstdint>
#include <vector>

namespace optstate::nvme {

// Frames in the order of their last use. Allocates only in the constructor.
//
// Threads: not thread-safe.
class FrameList {
 public:
  static constexpr uint32_t kEnd = UINT32_MAX;

  explicit FrameList(uint32_t frames) : links_(frames + 1) {
    links_[frames] = {frames, frames, true};
  }

  // Returns the frame used longest ago, and the one used next; kEnd: none.
  uint32_t first() const { return Named(links_.back().next); }
  uint32_t Next(uint32_t frame) const { return Named(links_[frame].next); }
  bool Has(uint32_t frame) const { return links_[frame].is_linked; }

  // Puts a frame that is not in the list at its end.
  void PushBack(uint32_t frame) {
    const auto end = static_cast<uint32_t>(links_.size() - 1);
    const uint32_t before = links_[end].previous;
    links_[frame] = {before, end, true};
    links_[before].next = frame;
    links_[end].previous = frame;
  }
  // Takes a frame out of the list, if it is there.
  void Remove(uint32_t frame) {
    if (!links_[frame].is_linked) return;
    const Link link = links_[frame];
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
    links_[frame].is_linked = false;
  }

 private:
  struct Link {
    uint32_t previous = 0;
    uint32_t next = 0;
    bool is_linked = false;
  };
  uint32_t Named(uint32_t link) const {
    return link == links_.size() - 1 ? kEnd : link;
  }

  std::vector<Link> links_;  // by frame, and the list's two ends
};

}  // namespace optstate::nvme

#endif  // OPTSTATE_STORAGE_TIERS_NVME_FRAME_LIST_H_
