mod beside;
mod queue;

use super::amount::CHILD_MIB;
use super::*;
use crate::model::vm::Spec;
use jiffy_wire::api::{ErrorKind, Priority, Purpose};
use jiffy_wire::vmm::PageSize;
use proptest::prelude::*;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::task::{JoinHandle, yield_now};

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(300);
const TOTAL: u64 = 10_000;
const PLACES: usize = 1024;

fn vm(mib: u64) -> Amount {
    Amount {
        soon: mib,
        whole: mib,
        cpus: 1,
    }
}

/// A request of the default owner, without a time limit of its own.
fn request() -> Request {
    Request {
        owner: DEFAULT_OWNER.into(),
        priority: Priority::Normal,
        wait: None,
        id: "0123456789ab".into(),
        name: "web".into(),
        purpose: Purpose::Start,
        request_id: None,
    }
}

fn limited(memory: Option<u64>) -> Bounds {
    Bounds {
        memory,
        ..Bounds::default()
    }
}

/// A host with this much available memory, which tests may change.
fn host(available: u64) -> (Arc<AtomicU64>, Box<Host>) {
    let now = Arc::new(AtomicU64::new(available));
    let said = Arc::clone(&now);
    let tell = move || {
        Ok(Memory {
            total: TOTAL,
            available: said.load(Ordering::Relaxed),
        })
    };
    (now, Box::new(tell))
}

impl Room {
    fn with_host(host: Box<Host>, bounds: Bounds, wait: Duration, places: usize) -> Arc<Room> {
        Arc::new(Room::on(host, bounds, wait, places))
    }
}

fn room(available: u64, limit: Option<u64>, patience: Duration) -> Arc<Room> {
    Room::with_host(host(available).1, limited(limit), patience, PLACES)
}

fn empty(room: &Room) -> bool {
    let state = room.state();
    state.totals == Totals::default() && state.line.is_empty()
}

/// Lets all tasks run until they wait.
async fn settle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

fn refused(result: Result<Reserved>) -> String {
    let error = result.unwrap_err().0;
    assert_eq!(error.kind, ErrorKind::NoRoom);
    assert!(error.hint.is_some());
    error.message
}

#[tokio::test]
async fn a_starting_vm_counts_until_ready_and_a_running_one_until_it_ends() {
    let (available, host) = host(300);
    let room = Room::with_host(host, limited(Some(500)), Duration::ZERO, PLACES);
    let mut first = room.reserve(request(), vm(200), 1).await.unwrap();
    assert_eq!(first.waited_ns, None);
    assert_eq!(
        refused(room.reserve(request(), vm(200), 1).await),
        "The VM wants 200 MiB of memory; the host has 300 MiB available, of which VMs that are starting will take 200 MiB."
    );
    // The first VM took half of its memory.
    available.store(200, Ordering::Relaxed);
    first.note_ready();
    first.note_ready();
    let second = room.reserve(request(), vm(200), 1).await.unwrap();
    drop(second);
    available.store(TOTAL, Ordering::Relaxed);
    assert_eq!(
        refused(room.reserve(request(), vm(301), 1).await),
        "The VM wants 301 MiB of memory; VMs have 200 MiB of the 500 MiB that they may have in all."
    );
    let third = room.reserve(request(), vm(300), 1).await.unwrap();
    drop((first, third));
    assert!(empty(&room));
}

#[tokio::test]
async fn more_may_be_promised_than_vms_use() {
    let bounds = Bounds {
        usable: NonZeroU64::new(200),
        ..limited(Some(400))
    };
    let room = Room::with_host(host(TOTAL).1, bounds, Duration::ZERO, PLACES);
    let used = Arc::new(AtomicU64::new(0));
    let in_use = Arc::clone(&used);
    room.measure_use(move || in_use.load(Ordering::Relaxed));
    let mut running = Vec::new();
    for mib in [10, 20] {
        let mut reserved = room.reserve(request(), vm(150), 1).await.unwrap();
        reserved.note_ready();
        running.push(reserved);
        used.store(mib, Ordering::Relaxed);
    }
    assert_eq!(
        refused(room.reserve(request(), vm(150), 1).await),
        "The VM wants 150 MiB of memory; VMs have 300 MiB of the 400 MiB that they may have in all."
    );
    used.store(130, Ordering::Relaxed);
    assert_eq!(
        refused(room.reserve(request(), vm(100), 1).await),
        "The VM wants 100 MiB of memory; 70 MiB of the 200 MiB that VMs may use are available."
    );
    // A VM that can't have its memory even alone.
    running.clear();
    used.store(0, Ordering::Relaxed);
    refused(room.reserve(request(), vm(201), 1).await);
    room.reserve(request(), vm(200), 1).await.unwrap();
}

#[tokio::test]
async fn a_request_that_can_never_fit_is_refused_at_once() {
    let limited = room(TOTAL, Some(500), LONG);
    let _all = limited.reserve(request(), vm(500), 1).await.unwrap();
    assert!(
        refused(limited.reserve(request(), vm(501), 1).await).starts_with("The VM wants 501 MiB")
    );
    let some = refused(limited.reserve(request(), vm(6), 100).await);
    assert!(some.starts_with("100 VMs want 600 MiB"), "{some}");
    // Without a VM that could end, the host's available memory can't grow either.
    let idle = room(100, None, LONG);
    refused(idle.reserve(request(), vm(101), 1).await);
    let _runs = idle.adopt(Amount::of_running(1, 1));
    refused(idle.reserve(request(), vm(102), 1).await);
    refused(idle.reserve(request(), vm(TOTAL + 1), 1).await);
}

#[tokio::test]
async fn a_host_with_unknown_memory_refuses_nothing() {
    let tell = || Err(io::ErrorKind::NotFound.into());
    let room = Room::with_host(Box::new(tell), limited(None), Duration::ZERO, PLACES);
    room.reserve(request(), vm(1 << 30), 1000).await.unwrap();
}

#[tokio::test]
async fn huge_pages_do_not_count_as_available_memory() {
    let mut spec = Spec {
        memory_mib: 128,
        ..Spec::default()
    };
    assert_eq!(
        (Amount::of(&spec).soon, Amount::of(&spec).whole),
        (128, 128)
    );
    spec.pages = PageSize::Huge2M;
    let huge = Amount::of(&spec);
    assert_eq!((huge.soon, huge.whole), (0, 128));
    let room = room(10, Some(200), Duration::ZERO);
    let _first = room.reserve(request(), huge, 1).await.unwrap();
    assert!(refused(room.reserve(request(), huge, 1).await).contains("128 MiB of the 200 MiB"));
}

#[tokio::test]
async fn a_thousand_children_need_little_and_their_reservation_splits() {
    let spec = Spec {
        memory_mib: 128,
        ..Spec::default()
    };
    let room = room(2500, None, Duration::ZERO);
    let all = room
        .reserve(request(), Amount::of_child(&spec), 1000)
        .await
        .unwrap();
    let mut parts = all.split();
    assert_eq!(parts.len(), 1000);
    assert_eq!(room.state().totals.held.soon, 2000);
    for part in &mut parts {
        part.note_ready();
    }
    let held = room.state().totals.held;
    assert_eq!((held.soon, held.whole), (0, 128_000));
    drop(parts);
    assert!(empty(&room));
}

/// Tasks that reserve one after the other; each notes its number when it is served.
fn queued_tasks(
    room: &Arc<Room>,
    wants: &[u64],
    served: &Arc<Mutex<Vec<usize>>>,
) -> Vec<JoinHandle<Result<Reserved>>> {
    let each = |(number, mib): (usize, &u64)| {
        let (room, served, mib) = (Arc::clone(room), Arc::clone(served), *mib);
        tokio::spawn(async move {
            let reserved = room.reserve(request(), vm(mib), 1).await?;
            served.lock().unwrap().push(number);
            Ok(reserved)
        })
    };
    wants.iter().enumerate().map(each).collect()
}

#[tokio::test]
async fn requests_are_served_in_order_of_arrival() {
    let room = room(TOTAL, Some(100), LONG);
    let served = Arc::default();
    let first = room.reserve(request(), vm(60), 1).await.unwrap();
    // The large request at the front is not overtaken by those that would fit.
    let mut line = queued_tasks(&room, &[100, 10, 10, 10, 90], &served);
    settle().await;
    assert!(served.lock().unwrap().is_empty());
    drop(first);
    let large = line.remove(0).await.unwrap().unwrap();
    let (from, to) = large.waited_ns.unwrap();
    assert!(from <= to);
    settle().await;
    assert_eq!(*served.lock().unwrap(), [0]);
    drop(large);
    let mut small = Vec::new();
    for task in line.drain(..3) {
        small.push(task.await.unwrap().unwrap());
    }
    settle().await;
    assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3]);
    small.truncate(1);
    let last = line.remove(0).await.unwrap().unwrap();
    drop((small, last));
    assert!(empty(&room));
}

#[tokio::test]
async fn an_aborted_request_leaves_the_queue_to_others() {
    let room = room(TOTAL, Some(100), LONG);
    let served = Arc::default();
    let first = room.reserve(request(), vm(50), 1).await.unwrap();
    let mut line = queued_tasks(&room, &[80, 70, 40], &served);
    settle().await;
    // Abort the second in the queue, and then the first.
    line.remove(1).abort();
    settle().await;
    assert!(served.lock().unwrap().is_empty());
    line.remove(0).abort();
    let third = line.remove(0).await.unwrap().unwrap();
    drop((first, third));
    assert!(empty(&room));
}

#[tokio::test]
async fn a_request_that_waits_too_long_is_refused() {
    let room = room(TOTAL, Some(100), Duration::from_secs(1));
    let all = room.reserve(request(), vm(100), 1).await.unwrap();
    let mut line = queued_tasks(&room, &[100, 50], &Arc::default());
    let last = refused(line.remove(1).await.unwrap());
    assert_eq!(
        last,
        "The VM wants 50 MiB of memory and waited 1 s for it; VMs have 100 MiB of the 100 MiB that they may have in all."
    );
    refused(line.remove(0).await.unwrap());
    drop(all);
    assert!(empty(&room));
    room.reserve(request(), vm(100), 1).await.unwrap();
}

#[tokio::test]
async fn the_error_says_that_a_request_was_never_first_in_the_queue() {
    let room = room(TOTAL, Some(100), LONG);
    let shortage = room.shortage(&room.state(), vm(50), 1);
    let error = shortage.error(Some(Duration::from_secs(10)));
    assert_eq!(
        error.0.message,
        "The VM wants 50 MiB of memory and waited 10 s for it; requests that are served before this one still wait."
    );
}

#[tokio::test]
async fn memory_freed_by_other_programs_is_noticed() {
    let (available, host) = host(10);
    let room = Room::with_host(host, limited(None), LONG, PLACES);
    let _runs = room.adopt(Amount::of_running(1000, 1));
    let line = queued_tasks(&room, &[100], &Arc::default());
    settle().await;
    available.store(100, Ordering::Relaxed);
    for task in line {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_request_waits_while_another_program_uses_most_memory() {
    let (available, host) = host(50);
    let room = Room::with_host(host, limited(None), LONG, PLACES);
    let _runs = room.adopt(Amount::of_running(100, 1));
    let line = queued_tasks(&room, &[120], &Arc::default());
    settle().await;
    // Even if all VMs ended, there would now be too little.
    available.store(0, Ordering::Relaxed);
    let small = room.reserve(request(), vm(101), 1);
    assert!(!refused(small.await).contains("waited"));
    tokio::time::sleep(2 * CHECK_INTERVAL).await;
    assert!(!line[0].is_finished());
    available.store(120, Ordering::Relaxed);
    for task in line {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn background_work_gets_only_free_memory_and_yields_to_requests() {
    let room = room(TOTAL, Some(100), LONG);
    assert!(room.reserve_background(vm(101)).is_none());
    let mut later = room.reserve_background(vm(60)).unwrap();
    assert!(
        room.reserve_background(vm(60)).is_none(),
        "memory is not reserved twice"
    );
    let fits = room.reserve(request(), vm(40), 1).await.unwrap();
    assert!(!later.was_claimed());
    assert!(room.reserve_background(vm(1)).is_none());
    // This request does not wait for the background work.
    let claims = room.reserve(request(), vm(40), 1).await.unwrap();
    assert_eq!(claims.waited_ns, None);
    assert!(later.was_claimed());
    later.claimed().await;
    drop(later);
    // While a request waits, there is no memory for background work.
    let line = queued_tasks(&room, &[90], &Arc::default());
    settle().await;
    assert!(room.reserve_background(vm(1)).is_none());
    let quiet = room.clone();
    let quiet = tokio::spawn(async move { quiet.wait_until_idle().await });
    settle().await;
    assert!(!quiet.is_finished());
    drop((fits, claims));
    quiet.await.unwrap();
    let waited = line.into_iter().next().unwrap().await.unwrap().unwrap();
    let later = room.reserve_background(vm(10)).unwrap();
    assert!(!later.was_claimed(), "an earlier claim does not count");
    // Background work gets no memory while the host is low, whatever the totals are.
    room.set_low_memory(true);
    assert!(later.was_claimed());
    drop((waited, later));
    assert!(room.reserve_background(vm(1)).is_none());
    drop(room.reserve(request(), vm(1), 1).await.unwrap());
    room.set_low_memory(false);
    assert!(!room.reserve_background(vm(1)).unwrap().was_claimed());
    assert!(empty(&room));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_request_that_does_not_wait_is_refused_only_for_lack_of_memory() {
    let room = room(TOTAL, Some(1000), Duration::ZERO);
    let one = |_| {
        let room = Arc::clone(&room);
        tokio::spawn(async move { room.reserve(request(), vm(10), 1).await })
    };
    let all: Vec<_> = (0..200).map(one).collect();
    let mut served = Vec::new();
    for one in all {
        served.extend(one.await.unwrap().ok());
    }
    assert_eq!(served.len(), 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_requests_never_get_the_same_memory() {
    const TASKS: u64 = 64;
    const LIMIT: u64 = 100;
    let room = room(TOTAL, Some(LIMIT), LONG);
    let (held, over) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let task = |number: u64| {
        let (room, held, over) = (Arc::clone(&room), Arc::clone(&held), Arc::clone(&over));
        tokio::spawn(async move {
            for round in 0..50 {
                let mib = 1 + (number * 31 + round * 17) % 60;
                let reserved = room.reserve(request(), vm(mib), 1).await.unwrap();
                if held.fetch_add(mib, Ordering::SeqCst) + mib > LIMIT {
                    over.store(true, Ordering::SeqCst);
                }
                yield_now().await;
                held.fetch_sub(mib, Ordering::SeqCst);
                drop(reserved);
            }
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(task).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(
        !over.load(Ordering::SeqCst),
        "more was reserved than the limit"
    );
    assert!(empty(&room));
}

/// Events that affect the memory of a node.
#[derive(Debug, Clone)]
enum Step {
    Reserve {
        mib: u64,
        child: bool,
        count: u32,
    },
    Later {
        mib: u64,
    },
    /// This VM is ready and has taken this percentage of its memory.
    Ready {
        which: usize,
        share: u64,
    },
    End {
        which: usize,
    },
    EndLater {
        which: usize,
    },
    /// Other programs take this many MiB.
    Others {
        mib: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let which = || 0..20_usize;
    prop_oneof![
        4 => (1..400_u64, any::<bool>(), 1..5_u32)
            .prop_map(|(mib, child, count)| Step::Reserve { mib, child, count }),
        1 => (1..400_u64).prop_map(|mib| Step::Later { mib }),
        3 => (which(), 0..=100_u64).prop_map(|(which, share)| Step::Ready { which, share }),
        2 => which().prop_map(|which| Step::End { which }),
        1 => which().prop_map(|which| Step::EndLater { which }),
        1 => (0..600_u64).prop_map(|mib| Step::Others { mib }),
    ]
}

/// A VM of the model.
struct Model {
    reserved: Reserved,
    amount: Amount,
    /// What the VM took, once it is ready.
    took: Option<u64>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn reservations_never_exceed_the_available_memory(
        limit in proptest::option::of(100..1500_u64),
        steps in proptest::collection::vec(step(), 1..80),
    ) {
        const MEMORY: u64 = 1000;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (available, host) = host(MEMORY);
        let room = Room::with_host(host, limited(limit), Duration::ZERO, PLACES);
        let (mut vms, mut later, mut others) = (Vec::<Model>::new(), Vec::new(), 0);
        for step in steps {
            let taken: u64 = vms.iter().filter_map(|vm| vm.took).sum();
            let free = MEMORY.saturating_sub(taken + others);
            available.store(free, Ordering::Relaxed);
            let sum = |of: fn(&Model) -> u64| vms.iter().map(of).sum::<u64>();
            let soon = sum(|vm| if vm.took.is_none() { vm.amount.soon } else { 0 });
            let whole = sum(|vm| vm.amount.whole);
            match step {
                Step::Reserve { mib, child, count } => {
                    let amount = Amount { soon: if child { CHILD_MIB } else { mib }, ..vm(mib) };
                    let all = amount.times(count);
                    let fits = soon + all.soon <= free
                        && limit.is_none_or(|limit| whole + all.whole <= limit);
                    let got = runtime.block_on(room.reserve(request(), amount, count));
                    prop_assert_eq!(got.is_ok(), fits);
                    if let Ok(reserved) = got {
                        let new = |reserved| Model { reserved, amount, took: None };
                        vms.extend(reserved.split().into_iter().map(new));
                    }
                }
                Step::Later { mib } => {
                    let behind: u64 = later.iter().map(|(_, mib)| mib).sum();
                    let fits = soon + behind + mib <= free
                        && limit.is_none_or(|limit| whole + behind + mib <= limit);
                    let got = room.reserve_background(vm(mib));
                    prop_assert_eq!(got.is_some(), fits);
                    later.extend(got.map(|got| (got, mib)));
                }
                Step::Ready { which, share } => {
                    if let Some(vm) = vms.get_mut(which) {
                        vm.took.get_or_insert(vm.amount.soon * share / 100);
                        vm.reserved.note_ready();
                    }
                }
                Step::End { which } if which < vms.len() => drop(vms.swap_remove(which)),
                Step::EndLater { which } if which < later.len() => drop(later.swap_remove(which)),
                Step::End { .. } | Step::EndLater { .. } => {}
                Step::Others { mib } => others = mib,
            }
        }
        drop((vms, later));
        prop_assert!(empty(&room));
    }
}

#[test]
fn the_memory_of_this_host_is_read() {
    let memory = meminfo().unwrap();
    assert!(memory.available <= memory.total && memory.total > 0);
}

#[tokio::test]
async fn a_request_that_adds_nothing_to_the_limit_is_not_refused_by_it() {
    let room = room(300, Some(100), Duration::ZERO);
    let _adopted = room.adopt(Amount::of_running(200, 1));
    let filled = Amount {
        soon: 300,
        ..Amount::default()
    };
    drop(room.reserve(request(), filled, 1).await.unwrap());
    let more = Amount {
        soon: 301,
        ..Amount::default()
    };
    assert!(refused(room.reserve(request(), more, 1).await).contains("300 MiB available"));
    refused(room.reserve(request(), vm(1), 1).await);
}
