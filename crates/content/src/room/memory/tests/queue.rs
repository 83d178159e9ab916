//! The order of waiting requests, and refusals.

use super::super::line::PASSES;
use super::*;
use std::collections::BTreeMap;

/// Default time limit of the tests' requests.
const WAIT: Duration = Duration::from_secs(100);

fn of(owner: &str, priority: Priority) -> Request {
    Request {
        owner: owner.into(),
        priority,
        ..request()
    }
}

fn ticket(request: Request, since: Instant) -> Ticket {
    Ticket {
        request,
        want: vm(10),
        count: 1,
        since,
        since_s: 1000,
        wait: WAIT,
        called: Arc::default(),
    }
}

/// A line of these requests, each named by its owner and a number.
fn line_of(requests: &[(&str, Priority)], now: Instant) -> Line {
    let mut line = Line::default();
    for (number, (owner, priority)) in requests.iter().enumerate() {
        let name = format!("{owner}{number}");
        let request = Request {
            name,
            ..of(owner, *priority)
        };
        line.enter(ticket(request, now));
    }
    line
}

/// Names in the order that `shown` gives; serves them all, which must give the same order.
fn served(mut line: Line) -> Vec<String> {
    let shown = line.shown(|_| true);
    let places = shown.iter().map(|one| one.place as usize);
    assert!(places.eq(1..=line.len()), "{shown:?}");
    let shown: Vec<String> = shown.into_iter().map(|one| one.name).collect();
    let mut served = Vec::new();
    while let Some((_, first)) = line.first() {
        served.push(first.request.name.clone());
        line.serve_first();
    }
    assert_eq!(
        served, shown,
        "the places are the order in which they are served"
    );
    assert!(line.is_empty());
    served
}

#[test]
fn owners_take_turns_regardless_of_their_number_of_requests() {
    use Priority::Normal;
    let requests = [
        ("a", Normal),
        ("a", Normal),
        ("a", Normal),
        ("b", Normal),
        ("c", Normal),
        ("b", Normal),
    ];
    let line = line_of(&requests, Instant::now());
    assert_eq!((line.len(), line.len_of("a"), line.len_of("d")), (6, 3, 0));
    assert_eq!(served(line), ["a0", "b3", "c4", "a1", "b5", "a2"]);
}

#[test]
fn a_higher_priority_is_served_first_and_owners_take_turns_in_each() {
    use Priority::{High, Low, Normal};
    let requests = [
        ("a", Low),
        ("a", Normal),
        ("b", Low),
        ("a", Normal),
        ("b", Normal),
        ("b", High),
    ];
    let line = line_of(&requests, Instant::now());
    assert!(!line.would_be_first(High) && !line.would_be_first(Normal));
    assert_eq!(served(line), ["b5", "a1", "b4", "a3", "a0", "b2"]);
    let line = line_of(&requests[..1], Instant::now());
    assert!(line.would_be_first(High) && line.would_be_first(Normal));
    assert!(!line.would_be_first(Low));
}

#[test]
fn a_new_owner_does_not_take_the_turn_of_the_first() {
    use Priority::Normal;
    let now = Instant::now();
    let mut line = line_of(&[("a", Normal), ("a", Normal), ("b", Normal)], now);
    line.serve_first();
    // It is b's turn, and then a's, no matter how many new owners arrive.
    for other in ["c", "d", "e"] {
        line.enter(ticket(of(other, Normal), now));
    }
    let owners: Vec<String> = line
        .shown(|_| true)
        .into_iter()
        .map(|one| one.owner)
        .collect();
    assert_eq!(owners, ["b", "a", "c", "d", "e"]);
}

#[test]
fn a_lower_priority_has_a_turn_after_some_of_higher_ones() {
    use Priority::{High, Low, Normal};
    let now = Instant::now();
    let mut line = line_of(&[("low", Low), ("low", Low), ("normal", Normal)], now);
    let many = 3 * PASSES;
    for _ in 0..many {
        line.enter(ticket(of("high", High), now));
    }
    let shown = line.shown(|_| true);
    let places = |priority| {
        let of_it = shown.iter().filter(move |one| one.priority == priority);
        of_it.map(|one| one.place).collect::<Vec<_>>()
    };
    // Both were passed over equally often; then the lowest priority goes first.
    assert_eq!(places(Low), [PASSES + 1, 2 * PASSES + 2]);
    assert_eq!(places(Normal), [PASSES + 2]);
    // An endless stream of other requests does not change that.
    for served in 0..PASSES {
        assert_eq!(line.first().unwrap().1.request.priority, High, "{served}");
        line.serve_first();
        line.enter(ticket(of("another", High), now));
    }
    assert_eq!(line.first().unwrap().1.request.priority, Low);
    assert!(!line.would_be_first(High), "the low priority is next");
    line.serve_first();
    assert_eq!(line.first().unwrap().1.request.priority, Normal);
    line.serve_first();
    assert_eq!(line.first().unwrap().1.request.priority, High);
}

#[test]
fn a_priority_without_requests_counts_no_passes() {
    use Priority::{High, Low, Normal};
    let now = Instant::now();
    let mut line = Line::default();
    for _ in 0..PASSES {
        line.note_served(High);
    }
    // A request that came later, or that left, has not been passed over.
    line.enter(ticket(of("a", Normal), now));
    assert!(line.would_be_first(High));
    for _ in 0..PASSES - 1 {
        line.note_served(High);
    }
    assert!(line.would_be_first(High));
    assert!(line.leave(0));
    line.enter(ticket(of("a", Low), now));
    line.note_served(Normal);
    assert!(line.would_be_first(High) && line.would_be_first(Normal));
    for _ in 1..PASSES {
        line.note_served(Normal);
    }
    assert!(!line.would_be_first(High) && !line.would_be_first(Normal));
}

#[test]
fn a_request_that_leaves_is_not_served_and_all_others_are() {
    use Priority::{Low, Normal};
    let now = Instant::now();
    let requests = [("a", Normal), ("b", Normal), ("a", Normal), ("b", Low)];
    let mut line = line_of(&requests, now);
    assert!(line.leave(1));
    assert!(!line.leave(1), "it has left");
    assert!(!line.leave(17));
    assert_eq!(line.len(), 3);
    assert_eq!(served(line), ["a0", "a2", "b3"]);
    let mut line = line_of(&requests, now);
    for number in [3, 0, 2, 1] {
        assert!(line.leave(number), "{number}");
    }
    assert!(line.is_empty() && line.first().is_none());
    assert!(line.would_be_first(Low), "nothing of it is left");
}

/// Tasks that reserve 100 MiB each, in this order; each notes its owner when it is served.
async fn in_order(
    room: &Arc<Room>,
    requests: &[(&'static str, Priority)],
    order: &Arc<Mutex<Vec<&'static str>>>,
) -> Vec<JoinHandle<Result<()>>> {
    let mut tasks = Vec::new();
    for &(owner, priority) in requests {
        let (room, order) = (Arc::clone(room), Arc::clone(order));
        let request = of(owner, priority);
        tasks.push(tokio::spawn(async move {
            let reserved = room.reserve(request, vm(100), 1).await?;
            order.lock().unwrap().push(owner);
            drop(reserved);
            Ok(())
        }));
        settle().await;
    }
    tasks
}

#[tokio::test]
async fn an_owner_with_many_requests_does_not_delay_another_by_more_than_one() {
    use Priority::{High, Low, Normal};
    let room = room(TOTAL, Some(100), LONG);
    let all = room.reserve(request(), vm(100), 1).await.unwrap();
    let order = Arc::default();
    let requests = [
        ("later", Low),
        ("many", Normal),
        ("many", Normal),
        ("many", Normal),
        ("one", Normal),
        ("urgent", High),
    ];
    let tasks = in_order(&room, &requests, &order).await;
    assert!(order.lock().unwrap().is_empty());
    drop(all);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let order = order.lock().unwrap();
    assert_eq!(*order, ["urgent", "many", "one", "many", "many", "later"]);
    assert!(empty(&room));
}

#[tokio::test]
async fn a_fitting_request_overtakes_only_lower_priorities() {
    use Priority::{High, Low, Normal};
    let room = room(TOTAL, Some(100), LONG);
    let _some = room.reserve(request(), vm(50), 1).await.unwrap();
    let waiting = Arc::clone(&room);
    let line = tokio::spawn(async move { waiting.reserve(of("a", Normal), vm(60), 1).await });
    settle().await;
    let at_once = |priority| {
        let request = Request {
            wait: Some(Duration::ZERO),
            ..of("b", priority)
        };
        room.reserve(request, vm(10), 1)
    };
    for priority in [Low, Normal] {
        let refused = refused(at_once(priority).await);
        assert!(
            refused.ends_with("are served before this one still wait."),
            "{refused}"
        );
    }
    drop(at_once(High).await.unwrap());
    line.abort();
    settle().await;
    drop(at_once(Low).await.unwrap());
}

#[tokio::test]
async fn a_waiting_request_is_overtaken_a_bounded_number_of_times() {
    use Priority::{High, Low};
    let room = room(TOTAL, Some(100), LONG);
    let some = room.reserve(request(), vm(50), 1).await.unwrap();
    let waiting = Arc::clone(&room);
    let low = tokio::spawn(async move { waiting.reserve(of("a", Low), vm(60), 1).await });
    settle().await;
    let at_once = || {
        let request = Request {
            wait: Some(Duration::ZERO),
            ..of("b", High)
        };
        room.reserve(request, vm(10), 1)
    };
    for _ in 0..PASSES {
        drop(at_once().await.unwrap());
    }
    refused(at_once().await);
    drop(some);
    drop(low.await.unwrap().unwrap());
    drop(at_once().await.unwrap());
    assert!(empty(&room));
}

#[tokio::test]
async fn a_request_that_becomes_first_is_served_without_a_release() {
    use Priority::{High, Low, Normal};
    let room = room(TOTAL, Some(100), LONG);
    let _some = room.reserve(request(), vm(50), 1).await.unwrap();
    let wait = |priority, mib| {
        let room = Arc::clone(&room);
        tokio::spawn(async move { room.reserve(of("a", priority), vm(mib), 1).await })
    };
    let normal = wait(Normal, 60);
    let low = wait(Low, 20);
    settle().await;
    assert!(!low.is_finished(), "it fits, but it is not its turn");
    let mut high = Vec::new();
    for _ in 0..PASSES {
        high.push(room.reserve(of("b", High), vm(1), 1).await.unwrap());
    }
    settle().await;
    assert!(low.is_finished());
    let places = room.queue().into_iter().map(|one| one.priority);
    assert_eq!(places.collect::<Vec<_>>(), [Normal]);
    normal.abort();
}

#[tokio::test]
async fn a_request_waits_as_long_as_it_says() {
    let room = room(TOTAL, Some(100), LONG);
    let _all = room.reserve(request(), vm(100), 1).await.unwrap();
    let waits = |wait| {
        let wait = Some(Duration::from_secs(wait));
        room.reserve(Request { wait, ..request() }, vm(50), 1)
    };
    assert!(!refused(waits(0).await).contains("waited"));
    assert!(refused(waits(1).await).contains("and waited 1 s for it;"));
    assert!(room.queue().is_empty());
}

#[test]
fn the_next_deadline_is_that_of_all_requests_or_of_an_owner() {
    let now = Instant::now();
    let mut line = line_of(&[("a", Priority::Normal)], now);
    line.enter(Ticket {
        wait: WAIT / 2,
        ..ticket(of("b", Priority::Low), now)
    });
    assert_eq!(line.next_deadline(None), Some(now + WAIT / 2));
    assert_eq!(line.next_deadline(Some("a")), Some(now + WAIT));
}

#[tokio::test]
async fn a_full_queue_refuses_and_leaves_places_for_other_owners() {
    use Priority::{High, Normal};
    let room = Room::with_host(host(TOTAL).1, limited(Some(100)), LONG, 4);
    let all = room.reserve(request(), vm(100), 1).await.unwrap();
    let order = Arc::default();
    let mut tasks = in_order(&room, &[("a", Normal); 3], &order).await;
    let full = |owner, priority| {
        let room = Arc::clone(&room);
        async move {
            let error = room
                .reserve(of(owner, priority), vm(1), 1)
                .await
                .unwrap_err()
                .0;
            assert_eq!((error.kind, error.status()), (ErrorKind::NoRoom, 503));
            assert!(error.hint.unwrap().contains("--queue-limit"));
            // Each of them waits longer than the longest retry time.
            assert_eq!(error.retry_after_s, Some(60));
            error.message
        }
    };
    assert_eq!(
        full("a", High).await,
        "3 requests of the owner a wait for memory or vCPUs; the queue accepts no more."
    );
    tasks.extend(in_order(&room, &[("b", Normal)], &order).await);
    assert_eq!(
        full("b", Normal).await,
        "4 requests wait for memory or vCPUs; the queue accepts no more."
    );
    // A request that does not wait takes no place.
    let at_once = Request {
        wait: Some(Duration::ZERO),
        ..request()
    };
    let refused = refused(room.reserve(at_once, vm(1), 1).await);
    assert!(refused.starts_with("The VM wants 1 MiB"), "{refused}");
    tasks.remove(0).abort();
    settle().await;
    tasks.extend(in_order(&room, &[("b", Normal)], &order).await);
    drop(all);
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(*order.lock().unwrap(), ["a", "b", "a", "b"]);
}

#[tokio::test]
async fn vcpus_are_bounded_like_memory() {
    let bounds = Bounds {
        memory: None,
        cpus: Some(4),
        ..Bounds::default()
    };
    let room = Room::with_host(host(TOTAL).1, bounds, Duration::ZERO, PLACES);
    let of = |cpus| Amount { cpus, ..vm(1) };
    let mut three = room.reserve(request(), of(3), 1).await.unwrap();
    // vCPUs are held as long as the VM runs.
    three.note_ready();
    assert_eq!(
        refused(room.reserve(request(), of(2), 1).await),
        "The VM wants 2 vCPUs; VMs have 3 of the 4 vCPUs that they may have in all."
    );
    let five = room.reserve(request(), of(1), 5).await.unwrap_err().0;
    assert!(
        five.message.starts_with("5 VMs want 5 vCPUs;"),
        "{}",
        five.message
    );
    assert!(five.hint.unwrap().contains("--cpu-share"));
    // A request without vCPUs is not refused for lack of them, even beside adopted VMs.
    let _adopted = room.adopt(Amount::of_running(1, 8));
    let filled = Amount { cpus: 0, ..vm(1) };
    drop(room.reserve(request(), filled, 1).await.unwrap());
    refused(room.reserve(request(), of(1), 1).await);
    drop((_adopted, three));
    // Background work gives its vCPUs up.
    let later = room.reserve_background(of(4)).unwrap();
    drop(room.reserve(request(), of(4), 1).await.unwrap());
    assert!(later.was_claimed());
    drop(later);
    assert!(empty(&room));
}

#[tokio::test]
async fn a_running_vm_has_more_vcpus_only_if_they_are_left() {
    let bounds = Bounds {
        memory: None,
        cpus: Some(4),
        ..Bounds::default()
    };
    let room = Room::with_host(host(TOTAL).1, bounds, Duration::ZERO, PLACES);
    let of = |cpus| Amount { cpus, ..vm(1) };
    let mut one = room.reserve(request(), of(1), 1).await.unwrap();
    let background = room.reserve_background(of(2)).unwrap();
    let mut other = room.reserve(request(), of(1), 1).await.unwrap();
    assert!(!background.was_claimed());
    one.set_cpus(3).unwrap();
    assert!(background.was_claimed());
    drop(background);
    let error = other.set_cpus(2).unwrap_err().0;
    assert_eq!(
        error.message,
        "The VM wants 1 vCPU; VMs have 4 of the 4 vCPUs that they may have in all."
    );
    // It keeps what it had.
    one.set_cpus(2).unwrap();
    other.set_cpus(2).unwrap();
    drop(other);
    drop(room.reserve(request(), of(2), 1).await.unwrap());
    drop(one);
    assert!(empty(&room));
}

#[tokio::test]
async fn a_waiting_request_is_listed_and_its_place_is_reported() {
    use Priority::{High, Normal};
    let room = room(TOTAL, Some(100), WAIT);
    let all = room.reserve(request(), vm(100), 1).await.unwrap();
    let named = |name: &str, priority| Request {
        name: name.into(),
        id: format!("id-{name}"),
        request_id: Some(format!("request-{name}").into()),
        ..of("a", priority)
    };
    let wait = |request: Request| {
        let room = Arc::clone(&room);
        tokio::spawn(async move { room.reserve(request, vm(30), 3).await })
    };
    let first = wait(named("first", Normal));
    settle().await;
    let second = wait(named("second", Normal));
    settle().await;
    let shown = room.queued_for("id-second").unwrap();
    assert_eq!(
        (shown.place, &*shown.name, &*shown.owner),
        (2, "second", "a")
    );
    assert_eq!((shown.vms, shown.memory_mib, shown.cpus), (3, 90, 3));
    assert_eq!(shown.until - shown.since, WAIT.as_secs());
    assert_eq!(room.queued_for("id-third"), None);
    assert_eq!(room.next_place("request-third", None).await, None);
    let place = async |last| {
        let queued = room.next_place("request-second", last).await;
        queued.map(|queued| queued.place)
    };
    assert_eq!(place(None).await, Some(2));
    let urgent = wait(named("urgent", High));
    assert_eq!(place(Some(2)).await, Some(3));
    urgent.abort();
    assert_eq!(place(Some(3)).await, Some(2));
    first.abort();
    assert_eq!(place(Some(2)).await, Some(1));
    drop(all);
    assert_eq!(place(Some(1)).await, None);
    assert!(second.await.unwrap().unwrap().waited_ns.is_some());
    assert!(empty(&room));
}

/// Requests that come, leave and are served.
#[derive(Debug, Clone)]
enum Move {
    Enter { owner: u8, priority: Priority },
    Leave { which: usize },
    Serve,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    use Priority::{High, Low, Normal};
    let priority = || prop_oneof![Just(Low), Just(Normal), Just(High)];
    let one = prop_oneof![
        4 => (0..4_u8, priority()).prop_map(|(owner, priority)| Move::Enter { owner, priority }),
        1 => (0..40_usize).prop_map(|which| Move::Leave { which }),
        2 => Just(Move::Serve),
    ];
    proptest::collection::vec(one, 1..120)
}

proptest! {
    #[test]
    fn each_request_keeps_one_place_in_the_queue_and_none_starves(moves in moves()) {
        let now = Instant::now();
        let mut line = Line::default();
        // Owner and priority by number.
        let mut model = BTreeMap::<u64, (String, Priority)>::new();
        let mut next = 0_u64;
        for step in moves {
            match step {
                Move::Enter { owner, priority } => {
                    let owner = format!("owner{owner}");
                    let request = Request { name: next.to_string(), ..of(&owner, priority) };
                    prop_assert_eq!(line.enter(ticket(request, now)), next);
                    model.insert(next, (owner, priority));
                    next += 1;
                }
                Move::Leave { which } => {
                    let number = model.keys().nth(which).copied();
                    prop_assert_eq!(line.leave(number.unwrap_or(u64::MAX)), number.is_some());
                    number.map(|number| model.remove(&number));
                }
                Move::Serve => {
                    let first = line.first().map(|(number, _)| number);
                    line.serve_first();
                    first.map(|number| model.remove(&number));
                }
            }
            prop_assert_eq!(line.len(), model.len());
            let numbers = numbers_in_order(&line);
            let mut sorted = numbers.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.iter().eq(model.keys()));
            for alike in model.values() {
                let theirs = numbers.iter().filter(|number| model[number] == *alike);
                prop_assert!(theirs.is_sorted());
            }
            for priority in [Priority::Low, Priority::Normal] {
                let is_it = |number: &u64| model[number].1 == priority;
                let mut passed = numbers.split(is_it).rev();
                // Requests after the last one of this class pass over nothing.
                passed.next();
                // One of low priority may also pass over normal ones, at both ends.
                prop_assert!(passed.all(|others| others.len() <= PASSES as usize + 2));
            }
        }
    }
}

/// The numbers of all requests, which are their names, in the order of the line.
fn numbers_in_order(line: &Line) -> Vec<u64> {
    let shown = line.shown(|_| true);
    let first = line.first().map(|(_, first)| &first.request.name);
    assert_eq!(first, shown.first().map(|one| &one.name));
    shown.iter().map(|one| one.name.parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wakeup_is_lost_among_many_requests_that_give_up() {
    const TASKS: usize = 48;
    let room = room(TOTAL, Some(100), LONG);
    let task = |number: usize| {
        let room = Arc::clone(&room);
        tokio::spawn(async move {
            for round in 0..40 {
                let kind = number * 7 + round * 13;
                let priority = [Priority::Low, Priority::Normal, Priority::High][kind % 3];
                let request = of(&format!("owner{}", kind % 5), priority);
                let mib = 1 + (kind as u64 * 31) % 100;
                let reserve = room.reserve(request, vm(mib), 1);
                // Some give up, at any moment.
                let patience = Duration::from_micros(kind as u64 % 700);
                match kind % 4 {
                    0 => drop(tokio::time::timeout(patience, reserve).await),
                    _ => drop(reserve.await.unwrap()),
                }
                yield_now().await;
            }
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(task).collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(empty(&room));
}

#[tokio::test]
async fn a_running_vm_grows_as_another_would_start_and_shrinks() {
    let room = room(TOTAL, Some(1000), LONG);
    let mut one = room.reserve(request(), vm(400), 1).await.unwrap();
    one.note_ready();
    let mut other = room.reserve(request(), vm(400), 1).await.unwrap();
    other.note_ready();
    // It waits in the queue, and gets what another gives up.
    let growth = {
        let room = Arc::clone(&room);
        tokio::spawn(async move {
            let more = Amount::of_growth(500);
            room.reserve(request(), more, 1).await
        })
    };
    settle().await;
    assert_eq!(room.queue().len(), 1);
    other.shrink_memory(100);
    one.add(growth.await.unwrap().unwrap());
    let held = room.state().totals.held;
    assert_eq!((held.soon, held.whole, held.cpus), (0, 1000, 2));
    other.shrink_memory(100);
    assert_eq!(room.state().totals.held, held, "it has that already");
    let too_much = room.reserve(request(), Amount::of_growth(1001), 1).await;
    assert!(refused(too_much).contains("1001 MiB"));
    one.shrink_memory(64);
    assert_eq!(room.state().totals.held.whole, 164);
    drop((one, other));
    assert!(empty(&room));
}
