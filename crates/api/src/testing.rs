//! Entry points for fuzzing: parsers of requests, without a node.

use crate::http;
use crate::queue::WaitQuery;
use axum::http::Uri;
use jiffy_content::images::config;
use jiffy_content::{checks, roots};
use jiffy_node::spec;
use jiffy_wire::api::{self, CreateVm};
use serde::de::{DeserializeOwned, IgnoredAny};
use std::collections::HashMap;

/// Parses a body of each request of the API, and checks the request.
///
/// # Panics
///
/// If a request that was accepted once is refused the second time.
pub fn body(kind: u8, bytes: &[u8]) {
    match kind % 9 {
        0 => read::<CreateVm>(bytes, wanted),
        1 => read::<api::RunVm>(bytes, |run| wanted(run.vm)),
        2 => read::<api::ForkVm>(bytes, |_| {}),
        3 => read::<api::MakeSnapshot>(bytes, |_| {}),
        4 => read::<api::PullImage>(bytes, |_| {}),
        5 => read::<api::PushArtifact>(bytes, |_| {}),
        6 => read::<api::MakeVolume>(bytes, |_| {}),
        7 => read::<api::ResizeVolume>(bytes, |_| {}),
        _ => read::<api::CommitVm>(bytes, |_| {}),
    }
}

fn read<T: DeserializeOwned>(bytes: &[u8], then: impl FnOnce(T)) {
    if let Ok(body) = http::object(bytes) {
        then(body);
    }
}

/// Volumes and command of an accepted specification must pass their checks again.
fn wanted(wanted: CreateVm) {
    if let Some(root_disk) = &wanted.root_disk {
        let _ = roots::check(root_disk);
    }
    if let Ok(spec) = spec::check_of(wanted, "base", &api::ImageConfig::default()) {
        checks::check_volumes(&spec.disks).expect("its volumes were checked");
        if let Some(command) = &spec.command {
            checks::check_command(command).expect("its command was checked");
        }
        let _ = spec::golden(&spec);
    }
}

/// Parses a query like the API.
pub fn query(text: &str) {
    if let Ok(uri) = text.parse::<Uri>() {
        let _ = http::query::<HashMap<String, IgnoredAny>>(&uri);
        let _ = http::query::<HashMap<String, u64>>(&uri);
        let _ = http::query::<HashMap<String, bool>>(&uri);
        let _ = WaitQuery::caller(&uri);
    }
}

/// Merges an image's configuration into a command.
pub fn image_config(json: &[u8]) {
    let Ok(read) = serde_json::from_slice::<api::ImageConfig>(json) else {
        return;
    };
    if config::check(&read).is_ok() {
        let _ = config::stop_signal(&read);
        let _ = spec::check_of(CreateVm::default(), "a", &read);
    }
}
