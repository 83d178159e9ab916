//! Errors and their causes.

use std::error::Error;

/// The error, its cause, the cause of that, and so on.
pub fn causes<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// The error and its causes in one sentence, without a full stop. Leaves out a cause whose text is
/// already in the sentence.
pub fn sentence(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    for cause in causes(error) {
        let more = cause.to_string();
        let more = more.trim_end_matches('.');
        if text.is_empty() {
            text.push_str(more);
        } else if !text.contains(more) {
            text.push_str(": ");
            text.push_str(more);
        }
    }
    text
}

/// The text with its first letter capitalised.
pub fn capitalised(mut text: String) -> String {
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    text
}

/// The first cause of type `E`, which may be the error itself.
pub fn find<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    causes(error).find_map(|cause| cause.downcast_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt;
    use std::io;

    #[derive(Debug)]
    struct TestError(&'static str, Option<Box<dyn Error>>);

    impl fmt::Display for TestError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for TestError {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref()
        }
    }

    #[test]
    fn each_cause_is_listed_once() {
        let full = io::Error::from(io::ErrorKind::StorageFull);
        let error = TestError("a file can't be written", Some(Box::new(full)));
        let error = TestError("the image can't be made: a file can't be written", {
            Some(Box::new(error))
        });
        assert_eq!(
            sentence(&error),
            "the image can't be made: a file can't be written: no storage space"
        );
        let kind = find::<io::Error>(&error).map(io::Error::kind);
        assert_eq!(kind, Some(io::ErrorKind::StorageFull));
        assert!(find::<fmt::Error>(&error).is_none());
    }

    #[test]
    fn a_sentence_ends_without_a_full_stop() {
        assert_eq!(sentence(&TestError("It failed.", None)), "It failed");
    }
}
