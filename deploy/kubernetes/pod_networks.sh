# Sourced by test_in_namespaces: a network for each pod with one link between them, and the certificates of both, in
# folders as kubelet mounts a Secret.
# shellcheck shell=bash

networks=optstate-pods-$$
daemon_address=10.213.8.1
trainer_address=10.213.8.2
tcp_port=7600

remove_networks() {
  ip netns delete "$networks-daemon" 2>/dev/null || true
  ip netns delete "$networks-trainer" 2>/dev/null || true
}

# Fails where this machine makes none, and leaves the reason in $1.
make_networks() {
  {
    ip netns add "$networks-daemon" && ip netns add "$networks-trainer" &&
      ip -n "$networks-daemon" link add eth0 type veth peer name eth0 netns "$networks-trainer" &&
      ip -n "$networks-daemon" address add "$daemon_address/24" dev eth0 &&
      ip -n "$networks-trainer" address add "$trainer_address/24" dev eth0 &&
      ip -n "$networks-daemon" link set lo up && ip -n "$networks-daemon" link set eth0 up &&
      ip -n "$networks-trainer" link set lo up && ip -n "$networks-trainer" link set eth0 up
  } 2>"$1" || {
    remove_networks
    return 1
  }
}

# Runs `issue NAME SUBJECT_ALT_NAME` for each pair, after the definitions that deploy/README.md gives to operators: they
# are read there. The CA is made with the first.
issue() {
  local folder=$1 commands
  shift
  commands=$(sed -n '/^openssl req -x509/,/^}$/p' deploy/README.md)
  [[ $commands == *'issue() {'* ]] || die "deploy/README.md has no commands for certificates"
  if [[ -e $folder/ca.key ]]; then commands=$(sed -n '/^issue() {/,$p' <<<"$commands"); fi
  (cd "$folder" && bash -euo pipefail -c "$commands"'
    while (($#)); do issue "$1" "$2"; shift 2; done' issue "$@") 2>"$folder/log" || die "openssl: $(<"$folder/log")"
}

# write_volume FOLDER UID FILE...: each is NAME=PATH. Files lie in a folder of their own that the link ..data points to,
# and are swapped all at once by a new link, as kubelet does when a Secret is renewed.
write_volume() {
  local folder=$1 uid=$2 file data
  shift 2
  data=$(mktemp -d "$folder/..XXXXXX")
  for file in "$@"; do
    install -m 0400 -o "$uid" "${file#*=}" "$data/${file%%=*}"
    ln -sfn "..data/${file%%=*}" "$folder/${file%%=*}"
  done
  chown "$uid" "$data"
  ln -s "${data##*/}" "$folder/..data_next"
  mv -T "$folder/..data_next" "$folder/..data"
}

# Makes what the pods of daemon and trainer are given, below $1: the daemon's with its configuration.
make_volumes() {
  local folder=$1 made
  made=$folder/made
  mkdir -p "$made" "$folder/daemon" "$folder/trainer"
  issue "$made" daemon "IP:$daemon_address" trainer URI:spiffe://cluster/trainer/pod stranger URI:spiffe://cluster/stranger
  cat >"$made/optstated.yaml" <<YAML
listen: ["$daemon_address:$tcp_port"]
tls:
  certificate_file: /run/optstate-tls/tls.crt
  key_file: /run/optstate-tls/tls.key
  client_ca_file: /run/optstate-tls/ca.crt
access:
  identities_file: /run/optstate-tls/identities.yaml
YAML
  cat >"$made/identities.yaml" <<'YAML'
identities:
  - {san: "URI:spiffe://cluster/trainer/pod", user: "100000", role: trainer}
YAML
  write_daemon_volume "$folder"
  write_volume "$folder/trainer" 100000 tls.crt="$made/trainer.crt" tls.key="$made/trainer.key" ca.crt="$made/ca.crt" \
    stranger.crt="$made/stranger.crt" stranger.key="$made/stranger.key"
}
write_daemon_volume() {
  write_volume "$1/daemon" 0 tls.crt="$1/made/daemon.crt" tls.key="$1/made/daemon.key" ca.crt="$1/made/ca.crt" \
    identities.yaml="$1/made/identities.yaml" optstated.yaml="$1/made/optstated.yaml"
}
# Renews the daemon's certificate.
renew() {
  issue "$1/made" daemon "IP:$daemon_address"
  write_daemon_volume "$1"
}

fingerprint() { openssl x509 -noout -fingerprint -sha256; }
# Prints that of the certificate which the daemon shows to whoever connects from the trainer's network.
served_fingerprint() {
  # It fails in the end, for it has no certificate itself.
  { nsenter --net="/run/netns/$networks-trainer" openssl s_client -connect "$daemon_address:$tcp_port" \
    </dev/null 2>/dev/null || true; } | fingerprint
}
