//! Log output.

use std::io;
use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, set_global_default};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const DEFAULT_LEVEL: LevelFilter = LevelFilter::WARN;

/// Warnings and errors go to stderr; RUST_LOG sets other levels, such as `debug` or
/// `warn,jiffy_vmm::pager=debug`. Filtering by spans and fields is not supported: it needs regular
/// expressions, which would be a tenth of this program. Messages that can't be written, because the
/// disk is full or the log has reached the limit of a file's size, are lost: reporting that would
/// write to stderr as well, and panic.
pub fn set_up() {
    let asked = std::env::var_os("RUST_LOG");
    match asked.map(|asked| asked.to_string_lossy().parse::<Targets>()) {
        Some(Ok(targets)) => {
            let log = layer().with_writer(io::stderr).log_internal_errors(false);
            tracing_subscriber::registry()
                .with(log)
                .with(targets)
                .init();
            return;
        }
        Some(Err(error)) => eprintln!("jiffy-vmm: RUST_LOG is not valid: {error}"),
        None => {}
    }
    set_global_default(LazySubscriber::default()).expect("nothing else sets it");
}

/// The subscriber. It is created when the first message is logged: most VMMs log nothing, and its
/// tables would cost a twentieth of a restore.
#[derive(Default)]
struct LazySubscriber(OnceLock<Box<dyn Subscriber + Send + Sync>>);

impl LazySubscriber {
    fn get(&self) -> &(dyn Subscriber + Send + Sync) {
        self.0
            .get_or_init(|| {
                let log = tracing_subscriber::fmt()
                    .with_max_level(DEFAULT_LEVEL)
                    .with_writer(io::stderr)
                    .log_internal_errors(false)
                    .with_ansi(false);
                Box::new(log.finish())
            })
            .as_ref()
    }
}

impl Subscriber for LazySubscriber {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.enabled(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &DEFAULT_LEVEL
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(DEFAULT_LEVEL)
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        self.get().new_span(attributes)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.get().record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.get().record_follows_from(span, follows);
    }

    fn event(&self, event: &Event<'_>) {
        self.get().event(event);
    }

    fn enter(&self, span: &Id) {
        self.get().enter(span);
    }

    fn exit(&self, span: &Id) {
        self.get().exit(span);
    }

    fn clone_span(&self, span: &Id) -> Id {
        self.get().clone_span(span)
    }

    fn try_close(&self, span: Id) -> bool {
        self.get().try_close(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_warning_creates_the_log() {
        let log = std::sync::Arc::new(LazySubscriber::default());
        tracing::subscriber::with_default(log.clone(), || {
            tracing::info!("not for operators");
            assert!(log.0.get().is_none());
            tracing::warn!("this is how a warning of a test looks");
            assert!(log.0.get().is_some());
        });
    }
}
