#include "server/observe/event_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace optstate::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kFirst = 1'700'000'000ull * 10'000 + 1;

v1::Event MakeEvent(const std::string& text, const std::string& job = "") {
  v1::Event event;
  event.set_kind("kind");
  event.set_job(job);
  event.set_text(text);
  return event;
}

v1::Event OfUser(uint32_t uid, const std::string& text) {
  v1::Event event = MakeEvent(text, absl::StrCat("job of ", uid));
  event.set_owner_uid(uid);
  return event;
}

std::vector<std::string> TextsOf(const std::vector<v1::Event>& events) {
  std::vector<std::string> texts;
  for (const v1::Event& event : events) texts.push_back(event.text());
  return texts;
}

class EventLogTest : public testing::Test {
 protected:
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  EventLog log_{[this] { return now_; }};
};

TEST_F(EventLogTest, EventsAreNumberedAndDated) {
  EXPECT_EQ(log_.Await(0, absl::InfinitePast()), 0u);
  log_.Add(MakeEvent("first"));
  now_ += absl::Milliseconds(1500);
  log_.Add(MakeEvent("second"));
  const std::vector<v1::Event> events = log_.After(0);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].sequence(), kFirst);
  EXPECT_EQ(events[0].at().seconds(), 1'700'000'000);
  EXPECT_EQ(events[1].sequence(), kFirst + 1);
  EXPECT_EQ(events[1].at().seconds(), 1'700'000'001);
  EXPECT_EQ(events[1].at().nanos(), 500'000'000);
  EXPECT_EQ(log_.Await(0, absl::InfinitePast()), kFirst + 1);
}

TEST_F(EventLogTest, ALaterLogBeginsAboveThisOne) {
  log_.Add(MakeEvent("before the crash"));
  now_ += absl::Seconds(1);
  EventLog next([this] { return now_; });
  next.Add(MakeEvent("after it"));
  EXPECT_GT(next.After(0)[0].sequence(), log_.After(0)[0].sequence());
}

TEST_F(EventLogTest, WhatIsAskedForIsFound) {
  log_.Add(MakeEvent("1", "a"));
  log_.Add(OfUser(7, "2"));
  log_.Add(MakeEvent("3", "b"));
  log_.Add(MakeEvent("4", "a"));
  EXPECT_THAT(TextsOf(log_.After(0)), ElementsAre("1", "2", "3", "4"));
  EXPECT_THAT(TextsOf(log_.After(kFirst + 1)), ElementsAre("3", "4"));
  EXPECT_THAT(TextsOf(log_.After(0, "a")), ElementsAre("1", "4"));
  EXPECT_THAT(TextsOf(log_.After(kFirst, "a")), ElementsAre("4"));
  EXPECT_THAT(log_.After(kFirst + 3), IsEmpty());
  EXPECT_THAT(log_.After(0, "none"), IsEmpty());
}

TEST_F(EventLogTest, TheOldestGoFirst) {
  for (size_t i = 0; i < EventLog::kEventsMax + 3; ++i) {
    log_.Add(MakeEvent(absl::StrCat(i)));
  }
  const std::vector<v1::Event> events = log_.After(0);
  ASSERT_EQ(events.size(), EventLog::kEventsMax);
  EXPECT_EQ(events.front().text(), "3");
  EXPECT_EQ(events.back().text(), absl::StrCat(EventLog::kEventsMax + 2));
}

TEST_F(EventLogTest, AFloodPushesOutItsOwnEventsAlone) {
  log_.Add(MakeEvent("the node's"));
  for (int i = 0; i < 100; ++i) log_.Add(OfUser(1, "a neighbour's"));
  for (size_t i = 0; i < 3 * EventLog::kEventsMax; ++i) {
    log_.Add(OfUser(2, absl::StrCat("flood ", i)));
  }
  const std::vector<v1::Event> events = log_.After(0);
  EXPECT_EQ(events.size(), EventLog::kEventsMax);
  size_t neighbours = 0;
  for (const v1::Event& event : events) neighbours += event.owner_uid() == 1;
  EXPECT_EQ(neighbours, 100u);
  EXPECT_EQ(events.front().text(), "the node's");
  EXPECT_EQ(events.back().text(),
            absl::StrCat("flood ", 3 * EventLog::kEventsMax - 1));
}

// More users than events fit: each has one, and the last ones stay.
TEST_F(EventLogTest, MoreUsersThanEvents) {
  for (uint32_t uid = 0; uid < EventLog::kEventsMax + 5; ++uid) {
    log_.Add(OfUser(uid, absl::StrCat(uid)));
  }
  const std::vector<v1::Event> events = log_.After(0);
  ASSERT_EQ(events.size(), EventLog::kEventsMax);
  EXPECT_EQ(events.front().text(), "5");
}

TEST_F(EventLogTest, TextsAreEscapedAndBounded) {
  log_.Add(MakeEvent("one\nline \x1b[2J", "a\tb"));
  v1::Event event = log_.After(0)[0];
  EXPECT_EQ(event.text(), "one\\nline \\x1b[2J");
  EXPECT_EQ(event.job(), "a\\tb");

  v1::Event large;
  large.set_kind(std::string(10'000, 'k'));
  large.set_job(std::string(10'000, '\x01'));
  large.set_actor(std::string(10'000, 'c'));
  large.set_text(std::string(10'000, '\x01'));
  log_.Add(large);
  event = log_.After(kFirst)[0];
  EXPECT_EQ(event.kind().size(), EventLog::kNameBytesMax);
  EXPECT_EQ(event.job().size(), EventLog::kNameBytesMax);
  EXPECT_EQ(event.actor().size(), EventLog::kNameBytesMax);
  EXPECT_EQ(event.text().size(), EventLog::kTextBytesMax);
}

// Protobuf refuses a string that ends within a character.
TEST_F(EventLogTest, ACharacterIsNotCut) {
  std::string text = "x";
  while (text.size() <= EventLog::kTextBytesMax) text += "\u00e9";
  log_.Add(MakeEvent(text));
  const v1::Event event = log_.After(0)[0];
  EXPECT_EQ(event.text().size(), EventLog::kTextBytesMax - 1);
  EXPECT_EQ(event.text(), text.substr(0, EventLog::kTextBytesMax - 1));
}

TEST_F(EventLogTest, AwaitEndsWithTheNextEventOrTheDeadline) {
  log_.Add(MakeEvent("first"));
  EXPECT_EQ(log_.Await(kFirst, absl::Now() + absl::Milliseconds(1)), kFirst);
  std::thread other([this] { log_.Add(MakeEvent("second")); });
  EXPECT_EQ(log_.Await(kFirst, absl::InfiniteFuture()), kFirst + 1);
  other.join();
}

TEST_F(EventLogTest, AnotherBuildGoesOn) {
  log_.Add(MakeEvent("1"));
  log_.Add(OfUser(7, "2"));
  now_ += absl::Hours(1);
  EventLog next([this] { return now_; });
  next.Add(MakeEvent("of the next build"));
  next.Restore(log_.After(0));
  next.Add(MakeEvent("later"));
  const std::vector<v1::Event> events = next.After(0);
  EXPECT_THAT(TextsOf(events),
              ElementsAre("1", "2", "of the next build", "later"));
  EXPECT_EQ(events[0].sequence(), kFirst);
  EXPECT_EQ(events[1].owner_uid(), 7u);
  EXPECT_EQ(events[2].sequence(), kFirst + 2);
  EXPECT_EQ(events[3].sequence(), kFirst + 3);
  EXPECT_EQ(events[0].at().seconds(), 1'700'000'000);
}

TEST_F(EventLogTest, NothingIsRestoredFromAnEmptyLog) {
  log_.Add(MakeEvent("own"));
  log_.Restore({});
  ASSERT_THAT(TextsOf(log_.After(0)), ElementsAre("own"));
  EXPECT_EQ(log_.After(0)[0].sequence(), kFirst);
}

// A build with another order or a larger log has handed these over.
TEST_F(EventLogTest, WhatIsRestoredIsBoundedAndAscends) {
  std::vector<v1::Event> events;
  for (size_t i = 0; i < EventLog::kEventsMax + 10; ++i) {
    events.push_back(MakeEvent("handed over"));
    events.back().set_sequence(i + 1);
  }
  events[5].set_sequence(3);
  log_.Restore(events);
  const std::vector<v1::Event> restored = log_.After(0);
  EXPECT_EQ(restored.size(), EventLog::kEventsMax);
  for (size_t i = 1; i < restored.size(); ++i) {
    EXPECT_LT(restored[i - 1].sequence(), restored[i].sequence());
  }
  EXPECT_EQ(restored.back().sequence(), EventLog::kEventsMax + 10);
}

}  // namespace
}  // namespace optstate::observe
