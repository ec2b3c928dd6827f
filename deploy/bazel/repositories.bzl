"""All external repositories. Everything is taken from the machine: Debian packages, no downloads."""

load("//deploy/bazel:system_library.bzl", "system_library")

def _debian_rules():
    native.local_repository(name = "bazel_skylib", path = "/usr/share/bazel/tools/skylib")
    native.local_repository(name = "rules_java", path = "/usr/share/bazel/rules/java")
    native.local_repository(name = "rules_proto", path = "/usr/share/bazel/rules/proto")

    # Debian's rules_cc is too new for its Bazel.
    native.local_repository(name = "rules_cc", path = "deploy/bazel/rules_cc")
    native.local_repository(name = "remote_coverage_tools", path = "deploy/bazel/remote_coverage_tools")

def _libraries():
    system_library(
        name = "absl",
        apt = "libabsl-dev",
        targets = {"absl": ["absl_*"]},
    )
    system_library(
        name = "protobuf",
        apt = "libprotobuf-dev",
        targets = {"protobuf": ["protobuf"]},
    )
    system_library(
        name = "grpc",
        apt = "libgrpc++-dev",
        targets = {
            "grpc++": ["grpc++", "protobuf"],
            "grpc++_error_details": ["-lgrpc++_error_details", "grpc++", "protobuf"],
            "grpc++_reflection": ["-lgrpc++_reflection", "grpc++", "protobuf"],
            "grpcpp_channelz": ["-lgrpcpp_channelz", "grpc++", "protobuf"],
        },
    )
    system_library(
        name = "yaml_cpp",
        apt = "libyaml-cpp-dev",
        targets = {"yaml_cpp": ["yaml-cpp"]},
    )
    system_library(
        name = "cli11",
        apt = "libcli11-dev",
        headers = ["CLI/CLI.hpp"],
        targets = {"cli11": []},
    )
    system_library(
        name = "smartcols",
        apt = "libsmartcols-dev",
        targets = {"smartcols": ["smartcols"]},
    )
    system_library(
        name = "systemd",
        apt = "libsystemd-dev",
        targets = {"systemd": ["libsystemd"]},
    )
    system_library(
        name = "hwloc",
        apt = "libhwloc-dev",
        targets = {"hwloc": ["hwloc"]},
    )
    system_library(
        name = "numa",
        apt = "libnuma-dev",
        targets = {"numa": ["numa"]},
    )
    system_library(
        name = "isal",
        apt = "libisal-dev",
        targets = {"isal": ["libisal"]},
    )
    system_library(
        name = "uring",
        apt = "liburing-dev",
        targets = {"uring": ["liburing"]},
    )
    system_library(
        name = "spdlog",
        apt = "libspdlog-dev",
        targets = {"spdlog": ["spdlog"]},
    )
    system_library(
        name = "highway",
        apt = "libhwy-dev",
        targets = {"hwy": ["libhwy"]},
    )
    system_library(
        name = "gtest",
        apt = "libgmock-dev libgtest-dev",
        targets = {
            "gtest": ["gmock", "gtest"],
            "gtest_main": ["gmock_main", "gmock", "gtest"],
        },
    )
    system_library(
        name = "benchmark",
        apt = "libbenchmark-dev",
        targets = {
            "benchmark": ["benchmark"],
            "benchmark_main": ["-lbenchmark_main", "benchmark"],
        },
    )
    system_library(
        name = "threads",
        apt = "libc6-dev",
        targets = {"threads": ["-lpthread"]},
    )

def optstate_repositories():
    _debian_rules()
    _libraries()
