//! The configuration of an untrusted image.

use crate::Target;
use jiffy_rootfs::ImageConfig;

/// This target.
pub const TARGET: Target = Target {
    name: "image_config",
    covers: &["crates/rootfs/src/config.rs"],
    seeds: all_seeds,
    run,
};

fn run(data: &[u8]) {
    let Ok(config) = ImageConfig::from_json(data) else {
        return;
    };
    let written = serde_json::to_vec(&config).expect("it is written");
    let again: ImageConfig = serde_json::from_slice(&written).expect("what was written is read");
    assert_eq!(again, config);
    assert!(
        config
            .env
            .iter()
            .all(|variable| variable.find('=').is_some_and(|at| at > 0))
    );
    assert!(config.exposed_ports.iter().all(|port| port.port > 0));
    let _ = config.command(&[]);
    let _ = jiffy_rootfs::Platform::default().runs(&config.platform);
}

fn all_seeds() -> Vec<Vec<u8>> {
    let text = r#"{"architecture":"amd64","os":"linux","variant":"v8","created":"2024-01-01T00:00:00Z",
        "config":{"User":"1000:users","ExposedPorts":{"80/tcp":{},"53/udp":{},"9":{}},
        "Env":["PATH=/bin","A=b","A=c"],"Entrypoint":["/init"],"Cmd":["sh","-c","x"],
        "Volumes":{"/data":{}},"WorkingDir":"/w","Labels":{"a":"b"},"StopSignal":"SIGRTMIN+3"},
        "rootfs":{"type":"layers","diff_ids":["sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"]}}"#;
    let nulls = r#"{"architecture":"arm64","os":"linux","config":{"Env":null,"Cmd":null,"ExposedPorts":null}}"#;
    vec![text.into(), nulls.into()]
}
