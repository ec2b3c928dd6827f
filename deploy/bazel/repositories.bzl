"""All external repositories. Everything is taken from the machine: Debian packages, no downloads."""

load("//deploy/bazel:cuda_toolkit.bzl", "cuda_toolkit")
load("//deploy/bazel:debian_source.bzl", "debian_source")
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
        run_time = {"libsmartcols.so.1": ["scols_"]},
        targets = {"smartcols": ["smartcols"]},
    )
    system_library(
        name = "systemd",
        apt = "libsystemd-dev",
        missing = -38,  # -ENOSYS
        run_time = {"libsystemd.so.0": ["sd_booted", "sd_is_", "sd_journal_", "sd_listen_", "sd_notify", "sd_pid_notify", "sd_watchdog_"]},
        targets = {"systemd": ["libsystemd"]},
    )
    system_library(
        name = "hwloc",
        apt = "libhwloc-dev",
        run_time = {"libudev.so.1": ["udev_device_", "udev_new", "udev_unref"]},
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
        run_time = {"libisal.so.2": ["crc32_iscsi"]},
        run_time_srcs = ["@optstate//deploy/bazel/run_time:crc32_iscsi.c"],
        targets = {"isal": ["libisal"]},
    )
    system_library(
        name = "uring",
        apt = "liburing-dev",
        targets = {"uring": ["liburing"]},
    )
    system_library(
        name = "spdlog",
        apt = "libspdlog-dev libfmt-dev",
        # Debian has no archive of either, and its headers are complete.
        defines = ["FMT_HEADER_ONLY", "SPDLOG_FMT_EXTERNAL"],
        headers = ["spdlog/spdlog-inl.h", "fmt/format-inl.h"],
        targets = {"spdlog": ["-lpthread"]},
    )
    system_library(
        name = "zlib",
        apt = "zlib1g-dev",
        targets = {"zlib": ["zlib"]},
    )
    system_library(
        name = "xxhash",
        apt = "libxxhash-dev",
        # The functions of xxhash are inlined.
        headers = ["xxhash.h"],
        targets = {"xxhash": []},
    )
    system_library(
        name = "highway",
        apt = "libhwy-dev",
        # Headers alone: kernels/ does not call what libhwy would have.
        headers = ["hwy/highway.h"],
        targets = {"hwy": []},
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
        name = "openssl",
        apt = "libssl-dev",
        # gRPC needs it too, so this adds nothing to what is shipped.
        targets = {"openssl": ["libssl", "libcrypto"]},
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

def _library_sources():
    """Adds the libraries that are compiled from Debian's source packages: whole, or few files for run_time/."""
    debian_source(
        name = "civetweb",
        build_file = "@optstate//deploy/bazel/library_sources:civetweb.BUILD",
        package = "libcivetweb-dev",
        source = "civetweb",
    )
    debian_source(
        name = "prometheus_cpp",
        build_file = "@optstate//deploy/bazel/library_sources:prometheus_cpp.BUILD",
        package = "prometheus-cpp-dev",
        source = "prometheus-cpp",
    )
    debian_source(name = "abseil_source", package = "libabsl-dev", source = "abseil")
    debian_source(name = "protobuf_source", package = "libprotobuf-dev", source = "protobuf")
    debian_source(name = "re2_source", package = "libre2-dev", source = "re2")

def optstate_repositories():
    _debian_rules()
    _libraries()
    _library_sources()
    cuda_toolkit(name = "cuda")
