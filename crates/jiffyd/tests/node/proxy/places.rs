//! Places of connections.

use super::clients::{Certificate, request, run, whole};
use super::http2::WEB;
use super::{HOST, connect, get_over, serve_for};
use crate::daemon::Daemon;
use crate::ports::published;
use crate::snapshots::counter;
use jiffy_wire::api::Vm;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// An eighth of the files that the daemon may open.
const PLACES: usize = 32;

/// Begins the daemon's process again, with few files.
fn again_with_few_files(daemon: &mut Daemon) {
    daemon.killed();
    let whole = daemon.command();
    let mut limited = Command::new("/bin/sh");
    limited
        .args(["-c", "ulimit -n $0; exec \"$@\""])
        .arg((8 * PLACES).to_string())
        .arg(whole.get_program())
        .args(whole.get_args())
        .envs(
            whole
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        )
        .env("JIFFY_VM_NETWORK", "on");
    daemon.begin(limited);
    daemon.answers();
}

#[test]
fn handshakes_have_places_and_requests_wait_for_connections_to_vms() {
    let certificate = Certificate::new();
    let mut daemon = certificate.daemon();
    again_with_few_files(&mut daemon);
    let vm: Vm = daemon.run_detached(published(counter())).json();
    let served = serve_for(&vm);
    // More requests than connections to VMs: each takes three seconds.
    let begun = Instant::now();
    run(async {
        let client = certificate.http2().await;
        let mut answers = JoinSet::new();
        for _ in 0..2 * PLACES {
            let mut client = client.clone();
            answers.spawn(async move {
                let sent = client.send_request(request(&format!("{WEB}events"), &[]));
                whole(sent.await.unwrap()).await
            });
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let most = served.requests.load(std::sync::atomic::Ordering::SeqCst);
        assert!(most <= PLACES, "{most} connections to a VM");
        while let Some(answer) = answers.join_next().await {
            let (status, body) = answer.unwrap();
            assert_eq!((status, &*body), (200, "data: 1\n\ndata: 2\n\n"));
        }
    });
    assert!(begun.elapsed() > Duration::from_secs(6));
    // All places are taken by clients that say nothing, until they are cut.
    let begun = Instant::now();
    let silent: Vec<_> = (0..PLACES).map(|_| connect()).collect();
    assert_eq!(get_over(certificate.connect(), "/head", HOST).0, 200);
    let waited = begun.elapsed();
    assert!(waited > Duration::from_secs(8), "it waited for {waited:?}");
    assert!(waited < Duration::from_secs(40), "it waited for {waited:?}");
    drop(silent);
}
