#include "client/ctl/chrome_trace.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

// Reads JSON with a parser that is not ours.
Struct Parse(const std::string& json) {
  Struct parsed;
  EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(json, &parsed).ok())
      << json;
  return parsed;
}

const Value& Field(const Struct& message, const std::string& name) {
  static const Value* const kAbsent = new Value;
  const auto found = message.fields().find(name);
  EXPECT_NE(found, message.fields().end()) << name;
  return found == message.fields().end() ? *kAbsent : found->second;
}

std::vector<Struct> EventsOf(const Struct& trace) {
  std::vector<Struct> events;
  for (const Value& value : Field(trace, "traceEvents").list_value().values()) {
    events.push_back(value.struct_value());
  }
  return events;
}

void AddLane(const std::string& group, const std::string& name,
             v1::TraceChunk* chunk) {
  v1::TraceLane* const lane = chunk->add_lanes();
  lane->set_group(group);
  lane->set_name(name);
}

v1::TraceSpan* AddSpan(uint32_t lane, const std::string& name, int64_t begin_ns,
                       int64_t duration_ns, v1::TraceChunk* chunk) {
  v1::TraceSpan* const span = chunk->add_spans();
  span->set_lane(lane);
  span->set_name(name);
  span->set_begin_ns(begin_ns);
  span->set_duration_ns(duration_ns);
  return span;
}

std::string Added(const v1::TraceChunk& chunk, ChromeTrace* trace) {
  auto text = trace->Add(chunk);
  EXPECT_TRUE(text.ok()) << text.status();
  return text.ok() ? *std::move(text) : "";
}

TEST(ChromeTraceTest, LanesAreThreadsAndSpansCompleteEvents) {
  ChromeTrace trace("gpt");
  std::string json = trace.Begin();
  v1::TraceChunk first;
  first.set_began_at_ns(1'700'000'000'123'456'789);
  AddLane("workers", "worker 0", &first);
  AddLane("disks", "reads of /nvme0", &first);
  AddSpan(0, "update", 1'234'567, 1'001, &first)->set_step(7);
  json += Added(first, &trace);
  json += Added(v1::TraceChunk(), &trace);  // a sign of life
  v1::TraceChunk second;
  AddLane("workers", "worker 1", &second);
  v1::TraceSpan* const read =
      AddSpan(1, "read", 9'007'199'254'740'993, 5, &second);
  read->set_bytes(4096);
  AddSpan(2, "update", 2'000'000, 0, &second);
  second.set_steps(1);
  second.set_lost_spans(3);
  second.set_done(true);
  json += Added(second, &trace);
  json += trace.End();
  EXPECT_EQ(trace.spans(), 3u);
  EXPECT_EQ(trace.lost_spans(), 3u);
  EXPECT_EQ(trace.steps(), 1u);
  EXPECT_TRUE(trace.done());

  const Struct parsed = Parse(json);
  std::vector<Struct> spans;
  std::vector<std::string> names;
  for (const Struct& event : EventsOf(parsed)) {
    const std::string& phase = Field(event, "ph").string_value();
    if (phase == "X") {
      spans.push_back(event);
      continue;
    }
    EXPECT_EQ(phase, "M");
    const Struct& arguments = Field(event, "args").struct_value();
    if (Field(event, "name").string_value() == "process_sort_index") continue;
    names.push_back(Field(event, "name").string_value() + " " +
                    Field(arguments, "name").string_value());
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "process_name workers", "thread_name worker 0",
                       "process_name disks", "thread_name reads of /nvme0",
                       "thread_name worker 1"}));
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(Field(spans[0], "name").string_value(), "update");
  EXPECT_EQ(Field(spans[0], "cat").string_value(), "workers");
  EXPECT_DOUBLE_EQ(Field(spans[0], "ts").number_value(), 1234.567);
  EXPECT_DOUBLE_EQ(Field(spans[0], "dur").number_value(), 1.001);
  EXPECT_EQ(
      Field(Field(spans[0], "args").struct_value(), "step").number_value(), 7);
  EXPECT_EQ(
      Field(Field(spans[1], "args").struct_value(), "bytes").number_value(),
      4096);
  EXPECT_EQ(Field(spans[2], "pid").number_value(),
            Field(spans[0], "pid").number_value());
  EXPECT_NE(Field(spans[2], "tid").number_value(),
            Field(spans[0], "tid").number_value());
  EXPECT_NE(Field(spans[1], "pid").number_value(),
            Field(spans[0], "pid").number_value());
  // No digit is lost, whatever a reader makes of it.
  EXPECT_NE(json.find("\"ts\":9007199254740.993"), std::string::npos);
  const Struct& other = Field(parsed, "otherData").struct_value();
  EXPECT_EQ(Field(other, "job").string_value(), "gpt");
  EXPECT_EQ(Field(other, "began_at_ns").string_value(), "1700000000123456789");
  EXPECT_EQ(Field(other, "lost_spans").number_value(), 3);
  EXPECT_TRUE(Field(other, "complete").bool_value());
}

TEST(ChromeTraceTest, ATraceWithoutSpansAndOneThatIsCutAreJson) {
  ChromeTrace trace("gpt");
  const std::string begin = trace.Begin();
  EXPECT_TRUE(EventsOf(Parse(begin + trace.End())).empty());
  v1::TraceChunk chunk;
  AddLane("workers", "worker 0", &chunk);
  AddSpan(0, "update", 1, 1, &chunk);
  const std::string added = Added(chunk, &trace);
  const Struct cut = Parse(begin + added + trace.End());
  EXPECT_EQ(EventsOf(cut).size(), 4u);
  const Struct& other = Field(cut, "otherData").struct_value();
  EXPECT_FALSE(Field(other, "complete").bool_value());
}

TEST(ChromeTraceTest, NamesAreEscaped) {
  const std::string strange = "a\"b\\c\n\t\x01/\xc3\xa4</script>";
  ChromeTrace trace(strange);
  std::string json = trace.Begin();
  v1::TraceChunk chunk;
  AddLane(strange, strange, &chunk);
  AddSpan(0, strange, 0, 0, &chunk);
  json += Added(chunk, &trace);
  json += trace.End();
  const Struct parsed = Parse(json);
  const std::vector<Struct> events = EventsOf(parsed);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(Field(events[3], "name").string_value(), strange);
  EXPECT_EQ(Field(events[3], "cat").string_value(), strange);
  EXPECT_EQ(
      Field(Field(events[2], "args").struct_value(), "name").string_value(),
      strange);
  EXPECT_EQ(
      Field(Field(parsed, "otherData").struct_value(), "job").string_value(),
      strange);
}

TEST(ChromeTraceTest, WhatCannotBeIsAnError) {
  v1::TraceChunk no_lane;
  AddSpan(0, "update", 1, 1, &no_lane);
  v1::TraceChunk early;
  AddLane("workers", "worker 0", &early);
  AddSpan(0, "update", -1, 1, &early);
  for (const v1::TraceChunk& chunk : {no_lane, early}) {
    ChromeTrace trace("gpt");
    const absl::Status status = trace.Add(chunk).status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
  }
}

}  // namespace
}  // namespace optstate::ctl
