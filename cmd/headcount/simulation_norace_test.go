//go:build !race

package main

const simDefault = 400
