//! Many VMs, few threads.

use super::support::*;
use jiffy_wire::pager::{PagerRequest, PagerResponse};

#[test]
fn fifty_vms_share_the_workers() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path(), MIB, |options| {
        options.working_set = Some((0..32).collect());
    });
    let pager = Pager::start(folder.path(), &["--workers", "2"]);
    assert_eq!(pager.ask(&PagerRequest::Ping), PagerResponse::Ok);
    let threads = pager.count("task");
    let vms: Vec<_> = (0..50)
        .map(|index| {
            let memory = Memory::new(MIB);
            let name = format!("vm{index}");
            let socket = pager.serve_as(&name, &image, None, index % 2 == 0);
            let connection = memory.connect(&socket);
            (name, memory, connection)
        })
        .collect();
    let checks: Vec<_> = vms
        .iter()
        .enumerate()
        .map(|(seed, (_, memory, _))| memory.check(seed))
        .collect();
    checks.into_iter().for_each(join);
    assert_eq!(
        threads, 5,
        "two workers, one for the sockets, the recorder, the one that waits for the end"
    );
    // One more thread may read the working set for all VMs.
    assert!(pager.count("task") <= threads + 1);
    for (name, _, connection) in vms {
        let stats = pager.filled(&name, MIB);
        assert_eq!(stats.bytes_filled, MIB as u64, "{name}");
        drop(connection);
        assert_eq!(pager.forget(&name), PagerResponse::Ok);
    }
}
