#include "client/ctl/event_text.h"

#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

v1::Event Example() {
  v1::Event event;
  event.mutable_at()->set_seconds(1'700'000'000);
  event.set_severity(v1::EVENT_SEVERITY_WARNING);
  event.set_kind("job_deleted");
  event.set_job("gpt");
  event.set_actor("uid 1000");
  event.set_text("deleted");
  return event;
}

TEST(EventTextTest, Lines) {
  EXPECT_EQ(EventLine(Example()),
            "2023-11-14T22:13:20Z warning job_deleted    job gpt: deleted (uid "
            "1000)\n");
  v1::Event event;
  event.set_kind("daemon_started");
  event.set_severity(v1::EVENT_SEVERITY_INFO);
  event.set_text("optstated starts");
  EXPECT_EQ(EventLine(event), "- info    daemon_started optstated starts\n");
}

TEST(EventTextTest, CellsFitTheColumns) {
  const std::vector<std::string> cells = EventCells(Example());
  EXPECT_EQ(cells, (std::vector<std::string>{"2023-11-14T22:13:20Z", "warning",
                                             "job_deleted", "gpt", "uid 1000",
                                             "deleted"}));
  EXPECT_EQ(EventCells({}).size(), EventColumns().size());
  EXPECT_EQ(EventCells({})[3], "-");
}

// A newer daemon may know another severity.
TEST(EventTextTest, ASeverityWithoutAName) {
  v1::Event event;
  EXPECT_EQ(EventCells(event)[1], "?");
  event.set_severity(static_cast<v1::EventSeverity>(77));
  EXPECT_EQ(EventCells(event)[1], "77");
}

}  // namespace
}  // namespace optstate::ctl
