package rows

// ScanInParts is Store.Scan for a store that reads up to most rows at a time. Part returns the first rows whose fields
// are greater than after. Each is called between the reads, so it may be slow, and may call the store.
func ScanInParts(
	after string, most int, part func(after string) ([]Row, error), each func(field string, value []byte) error,
) error {
	for {
		some, err := part(after)
		if err != nil {
			return err
		}

		for _, row := range some {
			if err := each(row.Field, row.Value); err != nil {
				return err
			}
		}
		// A whole part may have been the last one; then the next read finds nothing.
		if len(some) < most {
			return nil
		}

		after = some[len(some)-1].Field
	}
}

// Unread returns the results of a Read of n rows that failed as a whole.
func Unread(n int, err error) []Found {
	found := make([]Found, n)
	for i := range found {
		found[i].Err = err
	}

	return found
}
