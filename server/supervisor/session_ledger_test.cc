#include "server/supervisor/session_ledger.h"

#include <gtest/gtest.h>

namespace optstate::supervisor {
namespace {

TEST(SessionLedgerTest, Counts) {
  SessionLedger ledger;
  ledger.Add("a", 1);
  ledger.Add("a", 2);
  ledger.Add("b", 3);
  ledger.Add("b", 3);
  EXPECT_EQ(ledger.count(), 3u);
  EXPECT_EQ(ledger.count("a"), 2u);
  EXPECT_EQ(ledger.count("unknown"), 0u);
  ledger.Retain("a", {2, 3, 99});
  EXPECT_EQ(ledger.count(), 2u);
  ledger.Remove("a", 2);
  ledger.Remove("a", 2);
  ledger.Remove("unknown", 2);
  EXPECT_EQ(ledger.count(), 1u);
  ledger.Add("a", 2);
  ledger.Forget("b");
  ledger.Forget("unknown");
  EXPECT_EQ(ledger.count(), 1u);
}

}  // namespace
}  // namespace optstate::supervisor
