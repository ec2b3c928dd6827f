#include "client/views/streaming_copy.h"

#include <vector>

#include "gtest/gtest.h"

namespace optstate::client {
namespace {

// Tests every alignment of both ends, on both sides of the sizes at which
// copies stream.
TEST(StreamingCopyTest, CopiesEveryByteAndNoOther) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{511},
                             size_t{512}, size_t{6401}, (size_t{256} << 10) - 1,
                             size_t{256} << 10, (size_t{300} << 10) + 77}) {
    std::vector<unsigned char> from(bytes + 128);
    for (size_t i = 0; i < from.size(); ++i) {
      from[i] = static_cast<unsigned char>(i * 131 >> 3);
    }
    for (const size_t in_all : {bytes, size_t{1} << 30}) {
      for (const size_t shift : {0, 1, 15, 63}) {
        std::vector<unsigned char> to(bytes + 256, 0xee);
        StreamingCopy(to.data() + shift, from.data() + 64 - shift, bytes,
                      in_all);
        StreamingFence();
        for (size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= shift && i < shift + bytes;
          ASSERT_EQ(to[i], inside ? from[i + 64 - 2 * shift] : 0xee)
              << bytes << " bytes of " << in_all << ", shift " << shift
              << ", at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace optstate::client
