#ifndef OPTSTATE_SERVER_METRICS_COUNTER_SAMPLES_H_
#define OPTSTATE_SERVER_METRICS_COUNTER_SAMPLES_H_

#include "server/metrics/samples.h"

namespace optstate::metrics {

// Adds what the supervisor has counted since it started (observe/counters.h).
void AddCounters(Samples* samples);

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_COUNTER_SAMPLES_H_
