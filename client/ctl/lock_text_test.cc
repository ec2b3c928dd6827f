#include "client/ctl/lock_text.h"

#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

TEST(LockTextTest, SaysWhatIsLockedAndWhyNotAll) {
  v1::MemoryLock lock;
  lock.set_locked_bytes(8 << 20);
  EXPECT_EQ(LockText(lock), "8.0 MiB");
  lock.set_pending_bytes(1 << 20);
  EXPECT_EQ(LockText(lock), "8.0 MiB, 1.0 MiB being locked");
  lock.set_unlocked_bytes(2 << 20);
  lock.set_reason("raise it");
  EXPECT_EQ(LockText(lock),
            "8.0 MiB, 1.0 MiB being locked; 2.0 MiB not: raise it");
}

}  // namespace
}  // namespace optstate::ctl
