#ifndef OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_CHANNEL_H_
#define OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_CHANNEL_H_

#include <memory>

#include "client/channel/channel.h"
#include "client/endpoint/endpoint.h"

namespace optstate::client {

// Makes a channel for ranks that cannot share memory with the daemon: one gRPC
// stream carries everything. The gradient area is local memory, sent in chunks
// by Push; the parameter area is a local copy, read after attach, each commit
// and each load. Chunks are bounded, and a Push waits while the stream is full.
std::unique_ptr<Channel> MakeGrpcChannel(Endpoint endpoint, ChannelSetup setup);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_GRPC_GRPC_CHANNEL_H_
