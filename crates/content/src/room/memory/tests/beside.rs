//! Captures, which wait beside the queue.

use super::*;

/// The amount that a capture needs.
fn filled(mib: u64) -> Amount {
    Amount {
        soon: mib,
        ..Amount::default()
    }
}

#[tokio::test]
async fn a_capture_that_fits_is_served_despite_waiting_requests() {
    let room = room(TOTAL, Some(100), LONG);
    let all = room.reserve(request(), vm(100), 1).await.unwrap();
    let line = queued_tasks(&room, &[50], &Arc::default());
    settle().await;
    let capture = room.reserve_for_capture(filled(10), None).await.unwrap();
    assert_eq!(capture.waited_ns, None);
    assert_eq!(room.queue().len(), 1);
    // The requests that it makes room for are served.
    drop((capture, all));
    for task in line {
        drop(task.await.unwrap().unwrap());
    }
    assert!(empty(&room));
}

#[tokio::test]
async fn a_capture_without_room_waits_beside_the_queue() {
    let room = room(1000, None, LONG);
    let _runs = room.adopt(Amount::of_running(1000, 1));
    let starts = room.reserve(request(), vm(900), 1).await.unwrap();
    // The first in the queue lacks more than the capture.
    let line = queued_tasks(&room, &[950], &Arc::default());
    settle().await;
    let (other, holds) = (Arc::clone(&room), filled(100));
    let second = room.reserve_for_capture(holds, None).await.unwrap();
    let capture = tokio::spawn(async move { other.reserve_for_capture(filled(100), None).await });
    settle().await;
    assert!(!capture.is_finished());
    assert_eq!(room.queue().len(), 1, "the capture has no place in it");
    drop(second);
    let capture = capture.await.unwrap().unwrap();
    assert!(capture.waited_ns.is_some());
    settle().await;
    assert!(!line[0].is_finished());
    drop((starts, capture));
    for task in line {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_capture_notices_memory_freed_by_other_programs() {
    let (available, host) = host(10);
    let room = Room::with_host(host, limited(None), LONG, PLACES);
    let _runs = room.adopt(Amount::of_running(1000, 1));
    let other = Arc::clone(&room);
    let capture = tokio::spawn(async move { other.reserve_for_capture(filled(100), None).await });
    settle().await;
    available.store(100, Ordering::Relaxed);
    capture.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_capture_waits_for_its_own_time_limit_and_at_most_the_default() {
    let room = room(100, None, Duration::from_secs(1));
    let _runs = room.adopt(Amount::of_running(1000, 1));
    let waits = |wait_s: u64| {
        let wait = Some(Duration::from_secs(wait_s));
        room.reserve_for_capture(filled(101), wait)
    };
    assert!(!refused(waits(0).await).contains("waited"));
    assert!(refused(waits(86_400).await).contains("and waited 1 s for it;"));
    // This would not fit even if all VMs ended.
    let never = room.reserve_for_capture(filled(TOTAL + 1), None);
    assert!(!refused(never.await).contains("waited"));
}
