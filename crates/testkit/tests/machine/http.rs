//! HTTP requests to VMs, sent in the machine.

use crate::support::Jiffy;
use jiffy_testkit::Run;
use std::time::Duration;

/// Where the proxy listens of a daemon with [`WITH_PROXY`].
pub const PROXY: &str = "127.0.0.1:9000";

/// Settings of a daemon whose VMs have a network and a proxy.
pub const WITH_PROXY: &[(&str, &str)] = &[("JIFFY_VM_NETWORK", "on"), ("JIFFY_PROXY", PROXY)];

/// A request to this port of a VM, after which its connection is closed.
pub fn get(vm: &str, port: u16, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {port}-{vm}.localhost\r\nConnection: close\r\n\r\n")
}

impl Jiffy {
    /// The witness, which sends a request and prints the answer, and then how the connection ended. It
    /// must have been pushed.
    pub fn ask(&self, address: &str, request: String, limit: Duration) -> Run<'static> {
        let seconds = limit.as_secs().to_string();
        let ask = ["/tests/witness", "ask", address, &seconds];
        self.lab.command(ask).stdin(request)
    }
}
