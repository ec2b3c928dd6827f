#ifndef OPTSTATE_CLIENT_CTL_EVENT_TEXT_H_
#define OPTSTATE_CLIENT_CTL_EVENT_TEXT_H_

#include <string>
#include <vector>

#include "client/ctl/table.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// The columns of a table of events, and an event's cells.
std::vector<Column> EventColumns();
std::vector<std::string> EventCells(const v1::Event& event);

// Renders an event as one line, for a list that has no end.
std::string EventLine(const v1::Event& event);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_EVENT_TEXT_H_
