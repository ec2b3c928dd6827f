#ifndef OPTSTATE_PROTO_TLS_PEER_NAMES_H_
#define OPTSTATE_PROTO_TLS_PEER_NAMES_H_

#include <openssl/x509.h>

#include <string>
#include <vector>

namespace optstate::tls {

// Returns the names in a certificate (subjectAltName), as
// "URI:spiffe://cluster/trainer", "DNS:node7", "EMAIL:ada@example.org" or
// "IP:10.0.0.7". A name with a byte that is no printable ASCII is left out: it
// could pass for another one. Null: there is no certificate, and no name.
std::vector<std::string> PeerNames(const X509* certificate);

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_PEER_NAMES_H_
