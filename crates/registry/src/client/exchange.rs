use super::ClientOptions;
use crate::error::Result;
pub(super) struct Exchange {
    #[allow(dead_code)]
    options: ClientOptions,
}
impl Exchange {
    pub(super) fn new(options: ClientOptions) -> Result<Self> {
        Ok(Self { options })
    }
}
