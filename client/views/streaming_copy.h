#ifndef OPTSTATE_CLIENT_VIEWS_STREAMING_COPY_H_
#define OPTSTATE_CLIENT_VIEWS_STREAMING_COPY_H_

#include <cstddef>

namespace optstate::client {

// A memcpy for data that this core does not read again: large copies bypass the
// cache, so that the destination's lines are not fetched first; so do parts of
// a copy of `in_all` bytes that exceeds the caches. Copied data is visible to
// other threads once a later StreamingFence has returned and the threads
// synchronise as usual: one fence serves many parts, because it waits for all
// of them.
void StreamingCopy(void* to, const void* from, size_t bytes, size_t in_all);
void StreamingFence();

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_STREAMING_COPY_H_
