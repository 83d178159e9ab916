//! Replays recorded chunks with page faults: one thread touches them, and the pager's own workers
//! serve the faults.

use super::Touches;
use super::report::{Figures, Meter};
use super::strategy::Strategy;
use crate::handshake::Layout;
use crate::image::ChunkImage;
use crate::pool::{Pool, Settings};
use crate::vm::{Counters, Removed, Vm, VmParts};
use jiffy_sys::userfaultfd::{Arena, Features, Userfaultfd};
use jiffy_wire::pager::Mapping;
use std::io;
use std::sync::{Arc, Mutex};

pub(super) fn run(
    image: Arc<dyn ChunkImage>,
    touches: &Touches,
    strategy: &Strategy,
) -> io::Result<Figures> {
    let arena = Arena::anonymous(touches.size as usize)?;
    let uffd = Userfaultfd::create(Features::GUEST_MEMORY)?;
    arena.register(&uffd)?;
    let mapping = Mapping {
        base_host_virt_addr: arena.address(),
        size: touches.size,
        offset: 0,
        page_size: 4096,
        page_size_kib: 4096,
    };
    let layout = Layout::new(&[mapping], image.size()).map_err(io::Error::other)?;
    let counters = Arc::new(Counters::default());
    let failure = Arc::new(Mutex::new(None));
    // If a fault cannot be served, the thread that waits for it has to be woken.
    let (shared_failure, registered) = (failure.clone(), uffd.try_clone()?);
    let (address, length) = (arena.address(), touches.size);
    let vm = Arc::new(Vm::new(VmParts {
        name: strategy.name(),
        token: 1,
        uffd,
        removed: Removed::new(&layout),
        layout,
        image,
        counters: counters.clone(),
        touched: None,
        log: Arc::default(),
        on_failure: Box::new(move |sentence| {
            if let Ok(mut failure) = shared_failure.lock() {
                *failure = Some(sentence.to_owned());
            }
            let _ = registered.unregister(address, length);
        }),
    })?);
    let settings = Settings {
        fault_around: strategy.fault_around,
        ..Settings::default()
    };
    let pool = Pool::start(settings, Arc::default())?;
    let mut meter = Meter::start(touches);
    pool.attach(vm.clone())?;
    if strategy.prefetch {
        pool.prefetch(&vm, || {});
    }
    for offset in &touches.offsets {
        meter.begin();
        for page in (*offset..offset + touches.chunk_size).step_by(4096) {
            std::hint::black_box(arena.read(page as usize));
        }
        meter.end();
    }
    let mut figures = meter.finish();
    pool.detach(&vm);
    // A worker counts a fault only after it has woken the waiting thread.
    drop(pool);
    figures.requests = counters.stats(None).faults;
    let failure = failure.lock().ok().and_then(|mut failure| failure.take());
    match failure {
        None => Ok(figures),
        Some(sentence) => Err(io::Error::other(sentence)),
    }
}
