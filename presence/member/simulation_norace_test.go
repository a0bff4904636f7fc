//go:build !race

package member

const simDefault = 400
