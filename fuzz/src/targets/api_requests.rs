//! Requests of the daemon's API, with the names that they give.

use crate::Target;
use crate::input::Input;
use jiffy_api::testing;

/// This target.
pub const TARGET: Target = Target {
    name: "api_requests",
    covers: &[
        "crates/api/src",
        "crates/content/src/images/config.rs",
        "crates/content/src/images/name.rs",
        "crates/content/src/names.rs",
        "crates/node/src/spec",
        "crates/oci/src/digest.rs",
        "crates/oci/src/platform.rs",
        "crates/registry/src/reference.rs",
    ],
    seeds: all_seeds,
    run,
};

const BODY: u8 = 0;
const QUERY: u8 = 1;
const NAME: u8 = 2;
const CONFIG: u8 = 3;

fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 4 {
        BODY => testing::body(input.u8(), input.rest()),
        QUERY => testing::query(&String::from_utf8_lossy(input.rest())),
        NAME => {
            let text = String::from_utf8_lossy(input.rest());
            jiffy_content::testing::image_name(&text);
            let platform = text.parse::<jiffy_registry::Platform>();
            assert!(platform.is_err() || platform.is_ok_and(|one| one.to_string() == text));
            let digest = text.parse::<jiffy_registry::Digest>();
            assert!(digest.is_err() || digest.is_ok_and(|one| one.to_string() == text));
        }
        _ => testing::image_config(input.rest()),
    }
}

fn all_seeds() -> Vec<Vec<u8>> {
    let of = |kind: u8, text: &str| [&[kind], text.as_bytes()].concat();
    let body = |kind: u8, text: &str| [&[BODY, kind], text.as_bytes()].concat();
    let digest = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let mut seeds: Vec<_> = include_str!("../../../crates/wire/golden/api-1.txt")
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, text)| {
            let kinds = [
                "CreateVm",
                "RunVm",
                "ForkVm",
                "MakeSnapshot",
                "PullImage",
                "PushArtifact",
                "MakeVolume",
                "ResizeVolume",
                "CommitVm",
            ];
            let kind = kinds.iter().position(|known| *known == name)?;
            Some(body(kind as u8, text))
        })
        .collect();
    let vm = r#"{"name":"a","cpus":2,"memory_mib":64,"disks":[{"name":"v","mount":"/d","read_only":true,"limit":{"bytes_per_second":1048576}}],"command":{"argv":["sh"],"env":["A=b"],"workdir":"/","user":"root:root"},"hostname":"h","kernel_args":"quiet","root_disk":{"layer":{"size_mib":64}},"cpu_profile":"v3"}"#;
    seeds.push(body(0, vm));
    seeds.push(of(
        QUERY,
        "/v1/vms?all=true&grace_ms=100&tail=5&follow=false&path=%2Fa%20b",
    ));
    seeds.push(of(QUERY, "/v1/vms/a/wake?priority=high&wait_s=30"));
    for name in [
        "base",
        "a_vm-1.2",
        "registry.example.com:5000/a/b:tag",
        "localhost/a",
        "docker.io/library/debian:12",
        &format!("a/b@{digest}"),
        digest,
        "linux/arm64/v8",
    ] {
        seeds.push(of(NAME, name));
    }
    let config = r#"{"entrypoint":["/init"],"cmd":["x"],"env":["A=b"],"workdir":"/w","user":"1:2","stop_signal":"SIGRTMIN+3","exposed_ports":["80/tcp"],"labels":{"a":"b"}}"#;
    seeds.push(of(CONFIG, config));
    seeds
}
