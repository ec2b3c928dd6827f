#ifndef OPTSTATE_SERVER_METRICS_REPORT_TIME_H_
#define OPTSTATE_SERVER_METRICS_REPORT_TIME_H_

#include <google/protobuf/timestamp.pb.h>

namespace optstate::metrics {

// Seconds since 1970, as Prometheus has times.
inline double SecondsOf(const google::protobuf::Timestamp& time) {
  return static_cast<double>(time.seconds()) + time.nanos() / 1e9;
}

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_REPORT_TIME_H_
